"""The command line and the Python names behind it."""

import dataclasses
import json
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import tiny
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import llmcompress
from llmcompress import methods
from llmcompress.checkpoint.skeleton import Skeleton
from llmcompress.checkpoint.source import open_source
from llmcompress.cli import main
from llmcompress.errors import BadInput
from llmcompress.layerwise import linears_of


def run(*words):
    return CliRunner().invoke(main, list(map(str, words)), catch_exceptions=False)


def prune(source, out, text, *more, method="wanda", sparsity="2:4"):
    return run(
        "prune", "--model", source, "--method", method, "--sparsity", sparsity, "--calibration", text, "--samples", 8,
        "--seq-len", 32, "--device", "cpu", "--out", out, *more,
    )  # fmt: skip


def manifest(out):
    return json.loads((out / "llmcompress.json").read_text())


def linears(folder):
    """(layer, name) -> weight of every linear of every decoder layer."""
    skeleton = Skeleton(open_source(folder))
    return {
        (i, name): linear.weight
        for i in range(len(skeleton.layers))
        for name, linear in linears_of(skeleton, skeleton.read_layer(i)).items()
    }


@pytest.mark.parametrize("name", main.commands)
def test_help_of_every_command(name):
    result = run(name, "--help")
    assert result.exit_code == 0
    command = main.commands[name]
    assert command.help.splitlines()[0] in " ".join(result.stdout.split())
    for parameter in command.params:
        if parameter.param_type_name == "option":
            assert parameter.opts[0] in result.stdout
            assert parameter.help, parameter.opts


def test_help_says_which_number_of_a_pattern_is_kept():
    assert "n being the number kept" in " ".join(run("prune", "--help").stdout.split())


@pytest.mark.parametrize("command", [["--help"], ["prune", "--help"], ["methods"], ["--version"]])
def test_help_is_instant(command):
    program = (
        "import sys; from llmcompress.cli import main\n"
        f"try: main({command})\n"
        "except SystemExit as end: assert not end.code\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    seconds = []
    for _ in range(4):
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        seconds.append(time.perf_counter() - started)
    imported = set(done.stdout.splitlines()[-1].split())
    assert "click" in imported
    assert not imported & {"torch", "transformers", "datasets", "safetensors", "numpy", "scipy", "numba", "triton"}
    assert min(seconds) < 1


def test_version():
    assert run("--version").stdout == f"llmcompress, version {llmcompress.__version__}\n"


def test_methods_lists_each_with_its_options():
    shown = run("methods").stdout
    parts = re.split(rf"^(?=(?:{'|'.join(methods.MODULES)}) )", shown, flags=re.MULTILINE)[1:]
    assert [part.split()[0] for part in parts] == list(methods.MODULES)
    for part, name in zip(parts, methods.MODULES, strict=True):
        fields = dataclasses.fields(methods.find(name).Options)
        assert re.findall(r"--(\S+) \((.*?)\)", part) == [(f.name.replace("_", "-"), str(f.default)) for f in fields]


@pytest.mark.parametrize(
    ("method", "sparsity", "gone", "share"),
    [
        ("fista", "2:4", "50.0%", 0.5),
        ("sparsegpt", "1:4", "75.0%", 0.75),
        ("wanda", "3:4", "25.0%", 0.25),
        ("magnitude", "0.375", "37.5%", 0.375),
    ],
)
def test_prune_prints_what_was_measured_in_the_files(method, sparsity, gone, share, llama, text, tmp_path):
    out = tmp_path / "out"
    result = prune(llama, out, text, method=method, sparsity=sparsity)
    assert result.exit_code == 0 and result.stderr == ""
    lines = result.stdout.splitlines()
    assert f"{method} {sparsity}: {gone} of each linear's weights go" in lines[0]
    assert [line.split(":")[0] for line in lines if line.startswith("layer ")] == [f"layer {i}/3" for i in (1, 2, 3)]
    rows = {cells[0]: cells[1:] for line in lines if len(cells := re.split(r"\s*[│┃|]\s*", line.strip("│┃| "))) == 4}
    total = sum(weight.numel() for weight in linears(llama).values())
    left = sum(int((weight == 0).sum()) for weight in linears(out).values())
    assert rows["pruned linears"] == [f"{total:,}", f"{left:,}", f"{left / total:.2%}"]
    # FISTA may find that even fewer weights are worth keeping.
    assert left == total * share or method == "fista" and total * share <= left < total * share * 1.01
    assert rows["embeddings, head, norms"][1:] == ["0", "0.00%"]
    (worth,) = [line for line in lines if line.startswith("What this changes: ")]
    assert "the file and the memory stay as large as before" in worth
    assert ("NVIDIA GPUs" in worth) == (":" in sparsity)
    assert f"Verified and ready: {out}" in lines[-1]
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", result.stdout)


def test_file_is_as_large_as_before(llama, text, tmp_path):
    prune(llama, tmp_path / "out", text)
    dense, sparse = (sum(p.stat().st_size for p in f.glob("*.safetensors")) for f in (llama, tmp_path / "out"))
    assert dense <= sparse < dense + 20_000


def test_quiet_prints_nothing(llama, text, tmp_path):
    result = prune(llama, tmp_path / "out", text, "--quiet")
    assert result.exit_code == 0 and result.output == ""
    assert (tmp_path / "out" / "config.json").is_file()


def changed(field):
    """A value that the option takes and that is not its default."""
    if isinstance(field.default, bool):
        return not field.default
    if "choices" in field.metadata:
        return next(choice for choice in field.metadata["choices"] if choice != field.default)
    more = field.default + type(field.default)(1)
    return more if more <= field.metadata["most"] else field.default / 2


@pytest.mark.parametrize("method", methods.MODULES)
def test_every_option_of_a_method_reaches_it(method, llama, text, tmp_path):
    given = {field.name: changed(field) for field in dataclasses.fields(methods.find(method).Options)}
    words = []
    for name, value in given.items():
        flag = name.replace("_", "-")
        words += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", value]
    result = prune(llama, tmp_path / "out", text, *words, method=method, sparsity="0.5")
    assert result.exit_code == 0, result.stderr
    assert manifest(tmp_path / "out")["recipe"]["options"] == given


def test_settings_reach_the_manifest(llama, text, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"body": line}) + "\n" for line in text.read_text().splitlines()))
    words = ["--text-field", "body", "--seed", 7, "--error-correction", "layer", "--targets", "mlp.*", "--targets",
             "layers.1.self_attn.q_proj", "--max-memory", "8GiB"]  # fmt: skip
    assert prune(llama, tmp_path / "out", rows, *words, method="sparsegpt", sparsity="0.25").exit_code == 0
    written = manifest(tmp_path / "out")
    recipe = written["recipe"]
    assert recipe["method"] == "sparsegpt" and recipe["sparsity"] == "0.25"
    assert recipe["error_correction"] == "layer"
    calibration = recipe["calibration"]
    assert calibration.pop("tokens_sha256")
    assert calibration == {"source": str(rows), "samples": 8, "seq_len": 32, "seed": 7, "text_field": "body"}
    mlp = ["mlp.down_proj", "mlp.gate_proj", "mlp.up_proj"]
    assert written["pruned"] == [mlp, [*mlp, "self_attn.q_proj"], mlp]
    before, after = linears(llama), linears(tmp_path / "out")
    for (i, name), weight in before.items():
        assert torch.equal(weight, after[i, name]) == (name not in written["pruned"][i])


def test_overwrite_replaces_a_checkpoint(llama, text, tmp_path):
    out = tmp_path / "out"
    assert prune(llama, out, text).exit_code == 0
    (out / "stale.txt").write_text("of the old one")
    assert prune(llama, out, text, "--overwrite", method="magnitude").exit_code == 0
    assert manifest(out)["recipe"]["method"] == "magnitude"
    assert [p.name for p in tmp_path.iterdir()] == ["out"] and not (out / "stale.txt").exists()


def test_failed_overwrite_leaves_the_old_checkpoint(llama, text, tmp_path):
    out = tmp_path / "out"
    assert prune(llama, out, text).exit_code == 0
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    bad = shutil.copytree(llama, tmp_path / "bad")
    tensors = load_file(bad / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, bad / "model.safetensors", metadata={"format": "pt"})
    assert prune(bad, out, text, "--overwrite").exit_code == 2
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} == before


def test_default_folder_is_named_after_the_run(llama, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(llama, tmp_path / "models" / "Tiny-3.2-1B")
    words = ["--calibration", text, "--samples", 2, "--seq-len", 16, "--method", "wanda", "--device", "cpu"]
    assert run("prune", "--model", "models/Tiny-3.2-1B", "--sparsity", "1:4", *words).exit_code == 0
    assert run("prune", "--model", "models/Tiny-3.2-1B/", "--sparsity", "0.50", *words).exit_code == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["Tiny-3.2-1B-wanda-0.5", "Tiny-3.2-1B-wanda-1of4", "models"]


def inspect(folder):
    result = run("inspect", folder)
    assert result.exit_code == 0 and result.stderr == ""
    rows = [re.split(r"\s*[│┃|]\s*", line.strip("│┃| ")) for line in result.stdout.splitlines()]
    return result.stdout, [row for row in rows if len(row) == 4 and row[0].isdigit()]


def test_inspect_a_dense_model(llama):
    shown, rows = inspect(llama)
    model = AutoModelForCausalLM.from_pretrained(llama)
    in_layer = sum(p.numel() for p in model.model.layers[0].parameters())
    assert rows == [[str(i), f"{in_layer:,}", "0.00%", "-"] for i in range(3)]
    assert f"{model.num_parameters():,} parameters" in shown
    assert f"in {(llama / 'model.safetensors').stat().st_size / 1e6:.1f} MB of 1 files" in shown
    assert "llama, float32" in " ".join(shown.split())
    assert "not written by llmcompress" in shown


@pytest.mark.parametrize("sparsity", ["1:4", "2:4"])
def test_inspect_finds_the_pattern_and_the_history(sparsity, llama, text, tmp_path):
    prune(llama, tmp_path / "out", text, sparsity=sparsity)
    shown, rows = inspect(tmp_path / "out")
    assert [row[2:] for row in rows] == [["75.00%" if sparsity == "1:4" else "50.00%", sparsity]] * 3
    assert f"Made from {llama} by wanda {sparsity}" in " ".join(shown.split())


def test_inspect_shows_a_pattern_that_was_lost(llama, text, tmp_path):
    prune(llama, tmp_path / "out", text)
    path = next(p for p in sorted((tmp_path / "out").glob("*.safetensors")) if "-00002-of-" in p.name)
    tensors = load_file(path)
    # What merging an adapter does.
    tensors["model.layers.1.mlp.up_proj.weight"] += 0.01
    save_file(tensors, path, metadata={"format": "pt"})
    _, rows = inspect(tmp_path / "out")
    assert [row[3] for row in rows] == ["2:4", "-", "2:4"]
    assert float(rows[1][2].rstrip("%")) < 45


SLOW_FIRST_LAYER = """
import sys, time
from llmcompress import layerwise
from llmcompress.cli import main

def compress(*given, **named):
    print("inside", flush=True)
    time.sleep(120)

layerwise.Layerwise.compress = compress
main(sys.argv[1:])
"""


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_stopped_before_a_layer_is_finished_leaves_nothing(sent, code, llama, text, tmp_path):
    command = ["prune", "--model", llama, "--method", "wanda", "--calibration", text, "--samples", 4, "--seq-len", 32,
               "--out", tmp_path / "new" / "out"]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_FIRST_LAYER, *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    for line in process.stdout:
        if line == "inside\n":
            break
    assert (tmp_path / "new" / ".out.partial").is_dir()
    process.send_signal(sent)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == code
    assert stderr in ("", "Interrupted.\n")
    assert list(tmp_path.iterdir()) == []


def test_python_names(llama, text, tmp_path):
    seen = []
    result = llmcompress.prune(
        llama, method="wanda", sparsity=0.5, out=tmp_path / "out", scope="matrix",
        calibration=llmcompress.Calibration(str(text), samples=4, seq_len=32),
        on_event=lambda kind, data: seen.append(kind),
    )  # fmt: skip
    assert [kind for kind in seen if kind != "check"] == ["start", "layer", "layer", "layer", "done"]
    assert result.out == tmp_path / "out" and result.totals["pruned linears"]["sparsity"] == 0.5
    assert manifest(tmp_path / "out")["recipe"]["options"] == {"scope": "matrix"}
    model = llmcompress.load(tmp_path / "out")
    assert not model.training and model.dtype == torch.float32
    ids = torch.tensor([[1, 5, 9, 40]])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()(ids).logits)


def test_python_defaults_need_no_data(llama, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calibration = llmcompress.Calibration("self", samples=4)
    result = llmcompress.prune(llama, calibration=calibration)
    assert result.out == tmp_path / "compressed" and result.pattern == "2:4"
    recipe = manifest(result.out)["recipe"]
    assert recipe["method"] == "fista" and recipe["calibration"]["seq_len"] == 128


def test_load_keeps_the_stored_dtype(tmp_path):
    assert llmcompress.load(tiny.save("llama", tmp_path, torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize(("change", "words"), [("drop", "missing keys"), ("add", "unexpected keys")])
def test_load_refuses_weights_that_do_not_fit(change, words, llama, tmp_path):
    folder = shutil.copytree(llama, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    weight = tensors.pop("model.layers.2.mlp.up_proj.weight")
    if change == "add":
        tensors |= {"model.layers.2.mlp.up_proj.weight": weight, "model.layers.2.mlp.extra.weight": weight.clone()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadInput, match=f"has {words}: .*model.layers.2.mlp"):
        llmcompress.load(folder)


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="'llmcompress' has no attribute 'prun'"):
        llmcompress.prun  # noqa: B018
    assert all(getattr(llmcompress, name) for name in llmcompress.__all__)


def test_quickstart_compares_all_methods_and_keeps_the_fista_model(llama, tmp_path):
    out, text = tmp_path / "new" / "out", tiny.write_text(tmp_path / "long.txt", 8000)
    result = run("quickstart", "--model", llama, "--out", out, "--calibration", text, "--perplexity", text)
    assert result.exit_code == 0, result.stderr
    rows = [re.split(r"\s*[│┃|]\s*", line.strip("│┃| ")) for line in result.stdout.splitlines()]
    table = {row[0]: row[1:] for row in rows if len(row) == 5 and row[0]}
    assert list(table) == ["dense", "magnitude", "wanda", "sparsegpt", "fista"]
    assert [row[1] for row in table.values()] == ["-", "50.0%", "50.0%", "50.0%", "50.0%"]
    assert all(float(row[0]) > 1 for row in table.values())
    shown = run("eval", out, "--perplexity", text, "--seq-len", 128, "--max-windows", 10, "--quiet").stdout
    assert f"{float(shown):.2f}" == table["fista"][0]
    assert "What this changes: " in result.stdout and f"Checkpoint (FISTA): {out}" in result.stdout
    assert "10 windows of 128 tokens" in result.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["long.txt", "new"]
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["out"]
