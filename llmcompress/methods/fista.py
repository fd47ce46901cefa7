"""FISTAPruner: layer-wise LASSO solved by FISTA, with error correction inside each decoder layer.

Zhao et al., arXiv 2408.03728: min_V 1/2 ||V X*^T - W X^T||^2 + lambda ||V||_1, rounded to the pattern, lambda found by
bisection on the share of the error that rounding causes. Never worse than its rounded warm start. Beyond the paper:
columns scaled to unit input energy, lambda per row, a pull towards the dense weights, and a refit on the final mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcompress.methods import option, validate
from llmcompress.sparsity import Unstructured

if TYPE_CHECKING:
    import torch

NEEDS = frozenset({"gram", "cross"})
DAMP = 1e-4
# Weights solved at once where rows are independent: large enough for fast products, 32 MB in float32.
BLOCK = 2**23
# The bracket for lambda and its first value, as shares of the lambda above which a row is all zero.
LOWEST, FIRST = 1e-6, 1e-3
ERROR_CORRECTION = "sequential"


@dataclass(frozen=True)
class Options:
    warm_start: str = option("sparsegpt", "where FISTA starts", choices=("sparsegpt", "wanda", "magnitude", "dense"))
    rounds: int = option(3, "rounds of FISTA, rounding and a new lambda; 0 keeps the warm start", least=0, most=1000)
    patience: int = option(3, "rounds without improvement after which the search ends", least=1, most=1000)
    iterations: int = option(10, "FISTA iterations of a round", least=1, most=10_000)
    xi: float = option(0.3, "share of the error due to rounding above which lambda is raised", least=0.0, most=1.0)
    scope: str = option(
        "matrix", "unstructured only: weights compete in their row or matrix", choices=("row", "matrix")
    )
    scale: bool = option(True, "scale columns to unit input energy, so that the L1 norm weighs what a weight does")
    ridge: float = option(0.1, "pull towards the dense weights, in units of each input's energy", least=0.0, most=1e3)
    refit: bool = option(True, "solve the surviving weights again on the final mask")
    refit_steps: int = option(15, "conjugate gradient steps of the refit", least=1, most=10_000)

    __post_init__ = validate


@dataclass(frozen=True)
class Problem:
    """min_V v H v^T - 2 v c^T for each row of a block, in columns scaled to unit input energy.

    gram H (n, n), target C (m, n), best W' (m, n): the minimiser without a pattern, what error correction aims at;
    factor (n, n): its inverse's, bound: at least the largest eigenvalue of H, rows: matrix sizes m_i, sum m.
    """

    gram: torch.Tensor
    factor: torch.Tensor
    bound: float
    target: torch.Tensor
    best: torch.Tensor
    floor: torch.Tensor
    rows: list[int]

    def errors(self, value: torch.Tensor) -> torch.Tensor:
        """Squared error of each row beyond what no choice of weights can avoid, (m,) float64."""
        from llmcompress.solvers.fista import squared_errors

        return squared_errors(value, self.gram, self.target, self.floor)


def workspace(rows: int, columns: int, pattern, options: Options) -> int:
    """Float32 values held at once beside the weights and the result of a group, W (rows, columns)."""
    block = rows * columns if is_coupled(pattern, options) else min(rows * columns, BLOCK)
    return 4 * columns**2 + 10 * block


def prune(weights: dict[str, torch.Tensor], stats, pattern, options: Options, clock) -> dict[str, torch.Tensor]:
    """weights: (m_i, n) each; stats.gram H and stats.cross A, (n, n), both used up."""
    import torch

    from llmcompress.solvers.fista import lipschitz
    from llmcompress.solvers.obs import inverse_factor
    from llmcompress.solvers.refit import masked_refit

    diagonal = stats.gram.diagonal().clone()
    energy = diagonal if options.scale else diagonal.mean().expand_as(diagonal)
    scale = torch.where(energy > 0, energy.sqrt(), 1.0)
    # The pull adds ridge ||v - w||^2: a diagonal to H, a multiple of W to C. Targets first and in place of results:
    # for wide layers each (n, n) matrix that is given up early counts.
    result = {
        name: (weight @ stats.cross).div_(scale).addcmul_(weight, scale, value=options.ridge)
        for name, weight in weights.items()
    }
    gram = stats.take_gram().div_(scale).div_(scale[:, None])
    gram.diagonal().add_(options.ridge)
    factor, bound = inverse_factor(gram, DAMP), lipschitz(gram)
    for parts in blocks(weights, is_coupled(pattern, options)):
        dense = torch.cat([weights[name][rows] for name, rows in parts])  # (m, n)
        target = torch.cat([result[name][rows] for name, rows in parts])
        best = target @ factor.T @ factor
        floor = (best * (2 * target - best @ gram)).sum(1, dtype=torch.float64)
        sizes = [len(weights[name][rows]) for name, rows in parts]
        problem = Problem(gram, factor, bound, target, best, floor, sizes)
        value = search(problem, *warm_start(problem, dense, scale, pattern, options), pattern, options)
        if options.refit:
            with clock("refit"):
                # Shrinkage may zero more than the pattern asks; the refit takes those places up again.
                score = best.abs().masked_fill_(value != 0, torch.inf)
                keep = mask_of(score, sizes, pattern, options.scope)
                value = masked_refit(gram, target, value, keep, steps=options.refit_steps)
        for (name, rows), part in zip(parts, (value / scale).split(sizes), strict=True):
            result[name][rows] = part
    return result


def is_coupled(pattern, options: Options) -> bool:
    """Whether the rows of a matrix share one count of zeros."""
    return isinstance(pattern, Unstructured) and options.scope == "matrix"


def blocks(weights: dict[str, torch.Tensor], coupled: bool) -> Iterator[list[tuple[str, slice]]]:
    """What is solved at once: all matrices, or so many rows of them that the work space stays small.

    Where rows are independent the result does not depend on where they are cut.
    """
    whole = [(name, slice(0, len(w))) for name, w in weights.items()]
    width = next(iter(weights.values())).shape[1]
    step = max(1, BLOCK // width)
    if coupled or sum(len(w) for w in weights.values()) <= step:
        yield whole
        return
    for name, w in weights.items():
        for start in range(0, len(w), step):
            yield [(name, slice(start, min(start + step, len(w))))]


def warm_start(problem: Problem, dense: torch.Tensor, scale: torch.Tensor, pattern, options: Options):
    """Where FISTA starts and the rounded matrix that it must beat, both (m, n); the same unless it starts dense."""
    import torch

    from llmcompress.solvers.obs import sparsegpt

    if options.warm_start == "sparsegpt":
        # The objective is (v - w') H (v - w')^T plus a constant: SparseGPT's own problem, for W' in place of W.
        value = torch.cat(sparsegpt(list(problem.best.split(problem.rows)), problem.factor, pattern))
        return value, value
    scaled = dense * scale
    score = scaled if options.warm_start == "wanda" else dense
    rounded = round_to(scaled, score.abs(), problem.rows, pattern, options.scope)
    return (scaled if options.warm_start == "dense" else rounded), rounded


def round_to(value: torch.Tensor, score: torch.Tensor, rows: list[int], pattern, scope: str) -> torch.Tensor:
    """value with all but the largest scores of the pattern set to zero, each matrix on its own."""
    return value.masked_fill(~mask_of(score, rows, pattern, scope), 0.0)


def mask_of(score: torch.Tensor, rows: list[int], pattern, scope: str) -> torch.Tensor:
    """What the pattern keeps of each matrix, (m, n) bool."""
    import torch

    return torch.cat([pattern.keep(part, scope) for part in score.split(rows)])


def search(problem: Problem, start: torch.Tensor, rounded: torch.Tensor, pattern, options: Options) -> torch.Tensor:
    """The best rounded matrix (m, n) found, never worse than `rounded`: row by row where rows are independent."""
    import torch

    from llmcompress.solvers.fista import fista, lambda_max

    coupled = is_coupled(pattern, options)

    def pooled(errors: torch.Tensor) -> torch.Tensor:
        # Rows that compete for one count of zeros can only be accepted together.
        if not coupled:
            return errors
        return torch.cat([part.sum().expand(len(part)) for part in errors.split(problem.rows)])

    best, best_error = rounded, pooled(problem.errors(rounded))
    high = lambda_max(problem.target)
    low, penalty = high * LOWEST, high * FIRST
    idle = 0
    for _ in range(options.rounds):
        value = fista(problem.gram, problem.target, start, penalty, problem.bound, options.iterations)
        rounded = round_to(value, value.abs(), problem.rows, pattern, options.scope)
        error, unrounded = pooled(problem.errors(rounded)), pooled(problem.errors(value))
        better = error < best_error
        best = torch.where(better[:, None], rounded, best)
        best_error = torch.where(better, error, best_error)
        start = best
        idle = 0 if better.any() else idle + 1
        if idle >= options.patience:
            break
        share = 1 - (unrounded / error.clamp(min=1e-300)).sqrt()
        rounding_dominates = (share > options.xi)[:, None]
        low = torch.where(rounding_dominates, penalty, low)
        high = torch.where(rounding_dominates, high, penalty)
        penalty = (low * high).sqrt()
    return best
