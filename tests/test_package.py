"""What a user installs: a wheel with every module and the held-out text, and nothing else."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata, resources
from pathlib import Path

import pytest

import llmcompress

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOT_SOURCE = shutil.ignore_patterns(".*", "*venv*", "build", "dist", "*.egg-info", "__pycache__")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy of the sources, without a network."""
    if int(metadata.version("setuptools").partition(".")[0]) < 77:
        pytest.skip("the build backend, setuptools 77 or later, is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, folder / "source", ignore=NOT_SOURCE)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
               "--disable-pip-version-check", "--wheel-dir", folder, folder / "source"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_holds_every_module_and_no_test(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {str(p.relative_to(ROOT)) for p in (ROOT / "llmcompress").rglob("*.py")}
    expected |= {f"llmcompress/{p.relative_to(ROOT)}" for p in (ROOT / "kernels").rglob("*.py")}
    assert "llmcompress/kernels/__init__.py" in expected
    assert {name for name in names if name.endswith(".py")} == expected
    assert "llmcompress/data/heldout.txt" in names
    assert {name.partition("/")[0] for name in names} == {
        "llmcompress", f"llmcompress-{llmcompress.__version__}.dist-info",
    }  # fmt: skip


def test_wheel_works_where_it_is_unpacked(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    program = (
        "import llmcompress, llmcompress.kernels, torch\n"
        "from importlib import resources\n"
        "print(llmcompress.__file__, llmcompress.kernels.__file__, sep='\\n')\n"
        "print(len((resources.files('llmcompress.data') / 'heldout.txt').read_text()))\n"
        "print(llmcompress.kernels.nm_keep(torch.tensor([[3.0, 1, 4, 2]]), 2, 4).tolist())\n"
        "from llmcompress.cli import main\n"
        "main(['methods'])"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr
    package, kernels, length, keep, *shown = done.stdout.splitlines()
    assert Path(package) == tmp_path / "llmcompress" / "__init__.py"
    assert Path(kernels) == tmp_path / "llmcompress" / "kernels" / "__init__.py"
    assert int(length) > 20_000
    assert keep == "[[True, False, True, False]]"
    assert shown[0].startswith("fista ")


def test_wheel_declares_what_it_is(wheel):
    with zipfile.ZipFile(wheel) as archive:
        folder = f"llmcompress-{llmcompress.__version__}.dist-info"
        facts = archive.read(f"{folder}/METADATA").decode()
        assert (
            "[console_scripts]\nllmcompress = llmcompress.cli:main\n"
            in archive.read(f"{folder}/entry_points.txt").decode()
        )
    assert f"\nVersion: {PROJECT['version']}\n" in facts
    assert "\nLicense-Expression: Apache-2.0\n" in facts


def test_one_version():
    assert PROJECT["version"] == llmcompress.__version__ == metadata.version("llmcompress")


def test_everything_that_is_imported_is_declared():
    sources = [*(ROOT / "llmcompress").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]
    found = set()
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(node.module.partition(".")[0])
    foreign = found - set(sys.stdlib_module_names) - {"llmcompress"}
    optional = [name for names in PROJECT["optional-dependencies"].values() for name in names]
    declared = {re.match(r"[\w-]+", name)[0].replace("-", "_") for name in [*PROJECT["dependencies"], *optional]}
    # They come with transformers, and with datasets.
    assert foreign - declared <= {"huggingface_hub", "pyarrow"}


def test_held_out_text_is_prose():
    text = (resources.files("llmcompress.data") / "heldout.txt").read_text(encoding="ascii")
    assert 20_000 < len(text) < 30_000
    words = re.findall(r"[a-z']+", text.lower())
    triples = list(zip(words, words[1:], words[2:], strict=False))
    # Text that repeats itself would flatter every model.
    assert len(set(triples)) > 0.95 * len(triples)
    assert len(set(words)) > 1000
