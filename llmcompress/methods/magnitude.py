"""Magnitude: the smallest absolute weights go; no data needed.

The oldest baseline (Han et al., arXiv 1506.02626), one layer at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcompress.methods import option, validate

if TYPE_CHECKING:
    import torch

NEEDS = frozenset()
ERROR_CORRECTION = "off"


@dataclass(frozen=True)
class Options:
    scope: str = option(
        "matrix", "unstructured only: weights compete in their row or matrix", choices=("row", "matrix")
    )

    __post_init__ = validate


def workspace(rows: int, columns: int, pattern, options: Options) -> int:
    """Float32 values held at once beside the weights and the result of a group, W (rows, columns)."""
    return 2 * rows * columns


def prune(weights: dict[str, torch.Tensor], stats, pattern, options: Options, clock) -> dict[str, torch.Tensor]:
    """Keeps the largest |W_ij|. weights: (m, n) each; stats unused."""
    return {
        name: weight.masked_fill(~pattern.keep(weight.abs(), options.scope), 0.0) for name, weight in weights.items()
    }
