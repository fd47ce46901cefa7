"""SparseGPT: columns are pruned left to right, each error moved into the weights that follow.

Frantar and Alistarh, arXiv 2301.00774.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcompress.methods import option, validate

if TYPE_CHECKING:
    import torch

NEEDS = frozenset({"gram"})
ERROR_CORRECTION = "off"


@dataclass(frozen=True)
class Options:
    damp: float = option(0.01, "damping of the Gram matrix, in units of its mean diagonal", least=0.0, most=1e3)
    block: int = option(128, "columns pruned between two updates of the rest", least=1, most=1e6)

    __post_init__ = validate


def workspace(rows: int, columns: int, pattern, options: Options) -> int:
    """Float32 values held at once beside the weights and the result of a group, W (rows, columns)."""
    return 3 * columns**2 + rows * columns


def prune(weights: dict[str, torch.Tensor], stats, pattern, options: Options, clock) -> dict[str, torch.Tensor]:
    """weights: (m, n) each; stats.gram (n, n)."""
    from llmcompress.solvers.obs import inverse_factor, sparsegpt

    factor = inverse_factor(stats.gram, options.damp)
    return dict(zip(weights, sparsegpt(list(weights.values()), factor, pattern, options.block), strict=True))
