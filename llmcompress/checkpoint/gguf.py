"""GGUF in: a file becomes a safetensors folder once, in the user's cache, and is read lazily from there."""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import tempfile
from pathlib import Path

from llmcompress.errors import BadInput


def cache_folder() -> Path:
    """$LLMCOMPRESS_CACHE, or ~/.cache/llmcompress."""
    return Path(os.environ.get("LLMCOMPRESS_CACHE") or Path.home() / ".cache" / "llmcompress")


def convert(path: Path) -> Path:
    """Dequantises a .gguf file to float32 safetensors with config and tokenizer; returns the cached folder.

    Holds the whole model in memory while it converts. Raises BadInput.
    """
    if not path.is_file():
        raise BadInput(f"{path} does not exist; give the path of a .gguf file.")
    with open(path, "rb") as file:
        if file.read(4) != b"GGUF":
            raise BadInput(f"{path} is not a GGUF file (its first four bytes are not 'GGUF').")
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    target = cache_folder() / "gguf" / digest
    if (target / "config.json").is_file():
        return target
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise BadInput(f"reading {path.name} needs the package gguf: pip install 'llmcompress[gguf]'.") from None
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    try:
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except (ValueError, OSError, KeyError, IndexError, NotImplementedError, RuntimeError, struct.error) as error:
        raise BadInput(f"{path} can't be read as GGUF: {str(error).splitlines()[0]}") from error
    # The weights are plain float32 now; a left-over quantizer would make save_pretrained refuse or lie.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f"{digest}.", dir=target.parent))
    try:
        model.save_pretrained(work)
        tokenizer.save_pretrained(work)
        work.rename(target)
    except OSError:
        # Another process may have finished the same file first.
        if not (target / "config.json").is_file():
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target
