"""Where to compute and how much memory is left."""

from __future__ import annotations

import os

import torch

from llmcompress.errors import BadInput


def pick_device(name: str) -> str:
    """`auto` to a device that is there. Raises BadInput."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(name).type
    except RuntimeError:
        kind = None
    if kind not in ("cpu", "cuda"):
        raise BadInput(f"--device {name}: use cpu, cuda, cuda:N or auto.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise BadInput(f"--device {name}: torch sees no GPU here; use cpu.")
    if kind == "cuda" and (torch.device(name).index or 0) >= torch.cuda.device_count():
        raise BadInput(f"--device {name}: torch sees {torch.cuda.device_count()} GPUs here, counted from 0.")
    return name


def available_memory() -> int:
    """Bytes that can be taken without swapping."""
    try:
        with open("/proc/meminfo") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
