"""Reads a written checkpoint back and compares it with what it should hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from llmcompress.checkpoint.skeleton import Skeleton
from llmcompress.checkpoint.source import open_folder
from llmcompress.errors import BadInput, CorruptOutput
from llmcompress.evaluate.stream import Forward
from llmcompress.sparsity import Pattern


def verify(
    folder: Path, skeleton: Skeleton, pruned: list[set[str]], pattern: Pattern, probe: Forward
) -> dict[str, Any]:
    """Checks a checkpoint written from `skeleton`'s source; returns parameter and zero counts by class.

    Same tensors, shapes and dtypes as the source; those not pruned bit-identical; every pruned linear holds its
    pattern, without NaN, Inf or -0.0; logits of the reopened model equal to `probe`'s, which went through the layers
    in memory. Raises CorruptOutput naming the tensor.
    """
    source = skeleton.source
    try:
        written = open_folder(folder, source.trust_remote_code)
        reopened = Skeleton(written)
        reopened.fill_others(head=True)
        forward = Forward(reopened, probe.ids)
    except BadInput as error:
        raise CorruptOutput(f"{folder} can't be reopened: {error}") from error
    if set(written.files) != set(source.files):
        odd = sorted(set(written.files) ^ set(source.files))
        raise CorruptOutput(f"{folder}: tensor {odd[0]} is missing or was not in the source.")
    counts = {"pruned linears": [0, 0], "other tensors in decoder layers": [0, 0], "embeddings, head, norms": [0, 0]}
    for i in range(len(skeleton.layers)):
        names = skeleton.layer_names(i)
        before, after = source.read(names), written.read(names)
        touched = {p.name for linear in pruned[i] for p in skeleton.places[i][f"{linear}.weight"]}
        for name in names:
            kind = "pruned linears" if name in touched else "other tensors in decoder layers"
            _compare(name, before[name], after[name], changed=name in touched)
            _count(counts[kind], after[name])
        layer = reopened.fill_layer(i, after)
        for linear in pruned[i]:
            _check_pruned(f"layer {i} {linear}", layer.get_submodule(linear).weight, pattern)
        forward.through(i, layer)
    for name in skeleton.other_names():
        before, after = source.read([name])[name], written.read([name])[name]
        _compare(name, before, after, changed=False)
        _count(counts["embeddings, head, norms"], after)
    reopened_logits, in_memory = forward.logits(), probe.logits()
    if not torch.allclose(reopened_logits, in_memory, rtol=1e-4, atol=1e-4 * float(in_memory.abs().max())):
        raise CorruptOutput(f"{folder}: the reopened model's logits differ from those in memory.")
    return {
        kind: {"parameters": total, "zeros": zeros, "sparsity": zeros / total if total else 0.0}
        for kind, (total, zeros) in counts.items()
    }


def _check_pruned(where: str, weight: torch.Tensor, pattern: Pattern) -> None:
    if not weight.isfinite().all():
        raise CorruptOutput(f"{where} was written with NaN or Inf.")
    if (weight.signbit() & (weight == 0)).any():
        raise CorruptOutput(f"{where} was written with negative zeros.")
    if not pattern.holds(weight):
        raise CorruptOutput(f"{where} was written without its {pattern} pattern.")


def _compare(name: str, before: torch.Tensor, after: torch.Tensor, changed: bool) -> None:
    if before.shape != after.shape or before.dtype != after.dtype:
        raise CorruptOutput(f"tensor {name} changed from {before.dtype} {before.shape} to {after.dtype} {after.shape}.")
    # Flat, because a scalar has no bytes of its own to look at.
    if not changed and not torch.equal(*(t.flatten().view(torch.uint8) for t in (before, after))):
        raise CorruptOutput(f"tensor {name} was to stay as it is and has changed.")


def _count(pair: list[int], tensor: torch.Tensor) -> None:
    pair[0] += tensor.numel()
    pair[1] += int((tensor == 0).sum())
