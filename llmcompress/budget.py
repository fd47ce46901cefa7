"""How much memory a run may take, and how it gets by with it."""

from __future__ import annotations

import re
import resource
from dataclasses import dataclass

from llmcompress import methods
from llmcompress.checkpoint.skeleton import Skeleton
from llmcompress.device import available_memory
from llmcompress.errors import BadInput
from llmcompress.layerwise import Work, linears_of

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
FLOAT = 4
# What the allocator and the libraries take on top of the tensors that are counted.
SLACK = 100 * 2**20


def parse_bytes(text: str | int | None) -> int | None:
    """`4GiB`, `4G`, `4GB` or a number of bytes; units are powers of 1024. Raises BadInput."""
    if text is None or isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    size = float(match[1]) * UNITS[match[2].upper()] if match else 0
    if not size:
        raise BadInput(f"--max-memory {text}: give a size such as 4GiB or 900MiB.")
    return int(size)


def resident() -> int:
    """Bytes of this process that are in memory now."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return peak()


def peak() -> int:
    """The most bytes of this process that ever were in memory at once."""
    try:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        # On Linux this would count what the process that started this one had in memory.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass(frozen=True)
class Plan:
    """lockstep: all batches sleep inside a layer at once, else each runs again for every stage; in_memory: hidden
    states between layers are kept in memory, else only in files. need: bytes at the worst moment, limit: allowed."""

    lockstep: bool
    in_memory: bool
    need: int
    limit: int


def plan(skeleton: Skeleton, work: Work, tokens: int, batch: int, limit: int | None) -> Plan:
    """Chooses how to run within `limit` bytes (default: what is free now).

    tokens: calibration tokens in all, batch: in the largest batch. Raises BadInput saying what one layer needs when
    even the leanest way does not fit.
    """
    limit = limit or resident() + available_memory()
    parts = {"program": resident() + SLACK, "embeddings": other_bytes(skeleton), **layer_bytes(skeleton, work, batch)}
    least = sum(parts.values())
    if least > limit:
        told = ", ".join(f"{name} {gib(size)}" for name, size in parts.items() if size)
        raise BadInput(
            f"--max-memory {gib(limit)} is too little for one layer of {skeleton.source.name}, which needs "
            f"{gib(least)} with {work.method} ({told}); give more, or a method that needs less (magnitude, wanda)."
        )
    per_token = activation_bytes(skeleton, work)
    size = skeleton.compute_dtype.itemsize
    streams = 2 if work.error_correction == "model" else 1
    # Two boundaries: what enters the layer and what leaves it.
    hidden = tokens * skeleton.source.config.hidden_size * size * streams * 2
    in_memory = least + hidden <= limit
    asleep = tokens * per_token
    lockstep = in_memory and least + hidden + asleep <= limit
    return Plan(lockstep, in_memory, least + in_memory * hidden + lockstep * asleep, limit)


def other_bytes(skeleton: Skeleton) -> int:
    """What stands outside the layers: mapped from its file, in the compute dtype where that is another."""
    inside = sum(p.numel() for layer in skeleton.layers for p in layer.parameters())
    outside = sum(p.numel() for p in skeleton.model.parameters()) - inside
    return outside * skeleton.compute_dtype.itemsize


def activation_bytes(skeleton: Skeleton, work: Work) -> int:
    """Bytes that one token holds inside a sleeping layer, both streams together."""
    config = skeleton.source.config
    width = max(getattr(config, "intermediate_size", 0) or 0, config.hidden_size)
    return (4 * config.hidden_size + 2 * width) * skeleton.compute_dtype.itemsize * (1 + work.compares)


def layer_bytes(skeleton: Skeleton, work: Work, batch: int) -> dict[str, int]:
    """What the largest layer needs at once, by purpose."""
    method = methods.find(work.method)
    weights = solver = 0
    for layer in skeleton.layers:
        stored = sum(p.numel() for p in layer.parameters()) * skeleton.dtype.itemsize
        computed = sum(p.numel() for p in layer.parameters()) * skeleton.compute_dtype.itemsize
        shared = skeleton.dtype == skeleton.compute_dtype
        weights = max(weights, stored + computed * (1 + (work.compares and not shared)))
        linears = linears_of(skeleton, layer)
        for names in (*skeleton.family.groups, *([name] for name in linears)):
            group = [linears[name] for name in names if name in linears]
            if group:
                rows, columns = sum(m.out_features for m in group), group[0].in_features
                values = 2 * rows * columns + method.workspace(rows, columns, work.pattern, work.options)
                solver = max(solver, values * FLOAT)
    # One batch in both streams, with what a layer makes of it before it lets go, in float32 for the statistics.
    activations = batch * activation_bytes(skeleton, work) * 3 if work.needs else 0
    return {"weights": weights, "statistics and solver": solver, "one batch": activations}


def gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
