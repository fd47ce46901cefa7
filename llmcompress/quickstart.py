"""One small model, every method, one table."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

from llmcompress import methods
from llmcompress.calibration.tokens import Calibration
from llmcompress.checkpoint.load import load
from llmcompress.checkpoint.output import check_target
from llmcompress.checkpoint.source import open_source
from llmcompress.errors import BadInput
from llmcompress.evaluate.perplexity import perplexity, window_tokens
from llmcompress.pipeline import draw_tokens, prune

SAMPLES, SEQ_LEN = 48, 256
WINDOW, MAX_WINDOWS = 512, 10


def quickstart(
    model: str, out: str | os.PathLike, calibration: str, text: str | None,
    on_event: Callable[[str, dict[str, Any]], None],
) -> list[dict[str, Any]]:  # fmt: skip
    """Prunes `model` to 2:4 by every method; the FISTA checkpoint stays at `out`.

    Returns one dict per row, dense first, with name, perplexity, sparsity, seconds, bytes and text (what it was
    measured on). Raises BadInput before any work when `out` exists.
    """
    if Path(out).exists():
        raise BadInput(f"--out {out} exists; choose another folder.")
    source = open_source(model)
    check_target(out, source, overwrite=False)
    tokenizer = source.tokenizer()
    text = text or str(resources.files("llmcompress.data") / "heldout.txt")
    longest = getattr(source.config, "max_position_embeddings", None) or WINDOW
    windows = window_tokens(text, tokenizer, min(WINDOW, longest), MAX_WINDOWS)
    about = f"Perplexity on {Path(text).name}, {len(windows)} windows of {windows.shape[1]} tokens."
    on_event("note", {"text": f"{model}: measuring the dense model"})

    def measured(folder: str | os.PathLike, name: str, **facts: Any) -> dict[str, Any]:
        value = perplexity(
            load(folder), windows, text, lambda done, total: on_event("evaluate", {"done": done, "total": total})
        ).value
        opened = open_source(folder)
        on_event("note", {"text": f"{name}: perplexity {value:.2f}"})
        return {"name": name, "perplexity": value, "bytes": opened.bytes, "text": about, **facts}

    rows = [measured(model, "dense", sparsity=0.0, seconds=0.0)]
    tokens = Calibration(calibration, SAMPLES, min(SEQ_LEN, longest))
    if calibration == "self":
        on_event("note", {"text": f"calibration: the model writes {SAMPLES} texts of {tokens.seq_len} tokens itself"})
    # On the disk of `out`, so that the checkpoint can be moved there.
    nearest = next(p for p in Path(out).absolute().parents if p.exists())
    with tempfile.TemporaryDirectory(dir=nearest, prefix=".quickstart.") as work:
        # Sampled once, the same tokens for every method.
        tokens = tokens.drawn(draw_tokens(source, tokens))
        for name in reversed(methods.MODULES):
            started = time.time()
            folder = Path(work) / name
            result = prune(model, name, "2:4", folder, tokens)
            row = measured(
                folder, name, sparsity=result.totals["pruned linears"]["sparsity"], seconds=time.time() - started
            )
            rows.append(row)
            if name == "fista":
                Path(out).parent.mkdir(parents=True, exist_ok=True)
                folder.rename(out)
            else:
                shutil.rmtree(folder)
    return rows
