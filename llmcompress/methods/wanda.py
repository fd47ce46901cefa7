"""Wanda: the smallest |weight| times input norm go; the rest stays as it is.

Sun et al., arXiv 2306.11695.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcompress.methods import option, validate

if TYPE_CHECKING:
    import torch

NEEDS = frozenset({"norms"})
ERROR_CORRECTION = "off"


@dataclass(frozen=True)
class Options:
    scope: str = option("row", "unstructured only: weights compete in their row or matrix", choices=("row", "matrix"))

    __post_init__ = validate


def workspace(rows: int, columns: int, pattern, options: Options) -> int:
    """Float32 values held at once beside the weights and the result of a group, W (rows, columns)."""
    return 2 * rows * columns


def prune(weights: dict[str, torch.Tensor], stats, pattern, options: Options, clock) -> dict[str, torch.Tensor]:
    """Keeps the largest |W_ij| ||X*_j||. weights: (m, n) each; stats.norms (n,): ||X*_j||^2."""
    norms = stats.norms.sqrt()
    return {
        name: weight.masked_fill(~pattern.keep(weight.abs() * norms, options.scope), 0.0)
        for name, weight in weights.items()
    }
