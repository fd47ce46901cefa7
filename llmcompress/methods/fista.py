"""FISTAPruner: layer-wise LASSO solved by FISTA, with error correction inside each decoder layer.

Zhao et al., arXiv 2408.03728: min_V 1/2 ||V X*^T - W X^T||^2 + lambda ||V||_1, rounded to the pattern, lambda found by
bisection on the share of the error that rounding causes. Never worse than its rounded warm start. Beyond the paper:
columns scaled to unit input energy, lambda per row, a pull towards the dense weights, and a refit on the final mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcompress.methods import option, validate

if TYPE_CHECKING:
    import torch

NEEDS = frozenset({"gram", "cross"})
ERROR_CORRECTION = "sequential"


@dataclass(frozen=True)
class Options:
    warm_start: str = option("sparsegpt", "where FISTA starts", choices=("sparsegpt", "wanda", "magnitude", "dense"))
    rounds: int = option(4, "rounds of FISTA, rounding and a new lambda; 0 keeps the warm start", least=0, most=1000)
    patience: int = option(3, "rounds without improvement after which the search ends", least=1, most=1000)
    iterations: int = option(12, "FISTA iterations of a round", least=1, most=10_000)
    xi: float = option(0.3, "share of the error due to rounding above which lambda is raised", least=0.0, most=1.0)
    scope: str = option(
        "matrix", "unstructured only: weights compete in their row or matrix", choices=("row", "matrix")
    )
    ridge: float = option(0.1, "pull towards the dense weights, in units of each input's energy", least=0.0, most=1e3)
    refit: bool = option(True, "solve the surviving weights again on the final mask")
    refit_steps: int = option(30, "conjugate gradient steps of the refit", least=1, most=10_000)

    __post_init__ = validate


@dataclass(frozen=True)
class Problem:
    """min_V v H v^T - 2 v c^T per row, in columns scaled to unit input energy.

    gram H (n, n), target C (m, n), energy (m,) float64: the constant that makes the objective a squared error,
    rows: matrix sizes m_i, sum m.
    """

    gram: torch.Tensor
    target: torch.Tensor
    energy: torch.Tensor
    rows: list[int]

    def errors(self, value: torch.Tensor) -> torch.Tensor:
        from llmcompress.solvers.fista import squared_errors

        return squared_errors(value, self.gram, self.target, self.energy)


def prune(weights: dict[str, torch.Tensor], stats, pattern, options: Options, clock) -> dict[str, torch.Tensor]:
    """weights: (m_i, n) each; stats.gram H, stats.cross A, stats.dense_gram G, all (n, n)."""
    import torch

    from llmcompress.solvers.fista import energy
    from llmcompress.solvers.refit import masked_refit

    rows = [len(w) for w in weights.values()]
    dense = torch.cat(list(weights.values()))  # (m, n)
    gram = stats.gram
    diagonal = gram.diagonal()
    scale = torch.where(diagonal > 0, diagonal.sqrt(), 1.0)
    scaled = dense * scale
    unit = gram / scale / scale[:, None]
    target = dense @ stats.cross / scale
    constant = energy(dense, stats.dense_gram)
    # The pull adds ridge * ||v - w||^2 in scaled columns: a diagonal to H, a multiple of W to C.
    unit.diagonal().add_(options.ridge)
    problem = Problem(unit, target + options.ridge * scaled, constant + options.ridge * scaled.square().sum(1), rows)
    value = warm_start(problem, scaled, pattern, options)
    value = search(problem, value, pattern, options)
    if options.refit:
        value = masked_refit(problem.gram, problem.target, value, value != 0, steps=options.refit_steps)
    return dict(zip(weights, (value / scale).split(rows), strict=True))


def warm_start(problem: Problem, scaled: torch.Tensor, pattern, options: Options) -> torch.Tensor:
    """A matrix (m, n) in the pattern. SparseGPT aims at the dense output, the others start from the dense weights."""
    import torch

    from llmcompress.solvers.obs import inverse_factor, sparsegpt

    if options.warm_start == "sparsegpt":
        # With W' = C H^-1 the objective is (V - W') H (V - W')^T plus a constant: SparseGPT's own problem.
        factor = inverse_factor(problem.gram, 0.01)
        best = torch.cholesky_solve(problem.target.T, factor.flip(0, 1), upper=False) if False else None
        best = problem.target @ factor.T @ factor
        return torch.cat(sparsegpt(list(best.split(problem.rows)), factor, pattern))
    return round_to(scaled, scaled.abs(), problem.rows, pattern, options.scope)


def round_to(value: torch.Tensor, score: torch.Tensor, rows: list[int], pattern, scope: str) -> torch.Tensor:
    """value with all but the largest scores of the pattern set to zero, each matrix on its own."""
    import torch

    keep = torch.cat([pattern.keep(part, scope) for part in score.split(rows)])
    return value.masked_fill(~keep, 0.0)


def search(problem: Problem, start: torch.Tensor, pattern, options: Options) -> torch.Tensor:
    """The best rounded matrix (m, n) found; row by row never worse than `start`."""
    import torch

    from llmcompress.solvers.fista import fista, lambda_max, lipschitz

    best, best_error = start, problem.errors(start)
    bound = lipschitz(problem.gram)
    high = lambda_max(problem.target)
    low = high * 1e-6
    penalty = high * 1e-3
    idle = 0
    for _ in range(options.rounds):
        value = fista(problem.gram, problem.target, best, penalty, bound, options.iterations)
        rounded = round_to(value, value.abs(), problem.rows, pattern, options.scope)
        error, unrounded = problem.errors(rounded), problem.errors(value)
        better = error < best_error
        best = torch.where(better[:, None], rounded, best)
        best_error = torch.where(better, error, best_error)
        idle = 0 if better.any() else idle + 1
        if idle >= options.patience:
            break
        rounding = 1 - (unrounded / error.clamp(min=1e-300)).sqrt()
        raise_it = (rounding > options.xi)[:, None]
        low, high = torch.where(raise_it, penalty, low), torch.where(raise_it, high, penalty)
        penalty = (low * high).sqrt()
    return best
