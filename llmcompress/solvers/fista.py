"""FISTA for the LASSO min_V 1/2 ||V X*^T - W X^T||_F^2 + lambda ||V||_1 (FISTAPruner, arXiv 2408.03728, eq. 3-4).

Only H = X*^T X* and C = W X^T X* are needed; the gradient is V H - C.
"""

from __future__ import annotations

import torch


def lipschitz(gram: torch.Tensor, steps: int = 30) -> float:
    """Largest eigenvalue of `gram` (n, n), never below it by more than rounding: the gradient's Lipschitz constant.

    Power iteration on a block of eight vectors approaches from below, hence the 2% on top; the trace and the largest
    absolute row sum bound it from above.
    """
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(len(gram), min(8, len(gram)), generator=generator).to(gram)
    for _ in range(steps):
        block, _ = torch.linalg.qr(gram @ block)
    top = torch.linalg.eigvalsh(block.T @ gram @ block)[-1]
    bound = torch.minimum(gram.diagonal().sum(), gram.abs().sum(1).max())
    return float(torch.minimum(top * 1.02, bound))


def lambda_max(target: torch.Tensor) -> torch.Tensor:
    """Smallest lambda of each row whose solution is all zero, (m, 1): the largest |C_ij| of the row."""
    return target.abs().amax(dim=1, keepdim=True)


def fista(
    gram: torch.Tensor,
    target: torch.Tensor,
    start: torch.Tensor,
    penalty: torch.Tensor | float,
    bound: float,
    iterations: int = 20,
    tolerance: float = 1e-6,
) -> torch.Tensor:
    """At most `iterations` accelerated proximal steps from `start`.

    gram H (n, n), target C (m, n), start (m, n), penalty: lambda, a number or (m, 1), bound: L >= the largest
    eigenvalue of H. Stops when an iterate moves by less than `tolerance` relative to its own norm.
    Returns V (m, n). Rows are independent of each other.
    """
    if bound == 0:
        return start.clone()
    # One product per step: Y - (Y H - C) / L = Y (I - H / L) + C / L.
    contraction = gram / -bound
    contraction.diagonal().add_(1)
    shift = target / bound
    threshold = penalty / bound
    shrinks = torch.is_tensor(threshold) or threshold > 0
    previous, ahead, t = start, start, 1.0
    for step in range(iterations):
        current = torch.addmm(shift, ahead, contraction)
        if shrinks:
            # z - clamp(z, -s, s) is the soft threshold sign(z) max(|z| - s, 0).
            edge = threshold if torch.is_tensor(threshold) else torch.tensor(threshold).to(current)
            current = current - torch.minimum(torch.maximum(current, -edge), edge)
        t_next = (1 + (1 + 4 * t * t) ** 0.5) / 2
        ahead = torch.lerp(previous, current, 1 + (t - 1) / t_next)
        # The norm needs a pass over the matrix; every fourth step is often enough to stop early.
        if step % 4 == 3 and (current - previous).norm() <= tolerance * current.norm():
            return current
        previous, t = current, t_next
    return previous


def squared_errors(
    value: torch.Tensor, gram: torch.Tensor, target: torch.Tensor, dense_energy: torch.Tensor
) -> torch.Tensor:
    """||V_i X*^T - W_i X^T||^2 of each row i, (m,), from the identity v H v^T - 2 v c^T + w G w^T.

    value V (m, n), gram H (n, n), target C (m, n), dense_energy w G w^T (m,). Never negative.
    """
    product = value @ gram
    return (value * (product - 2 * target)).sum(1, dtype=torch.float64).add(dense_energy).clamp_(min=0)


def energy(value: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    """v H v^T of each row, (m,), float64."""
    return (value * (value @ gram)).sum(1, dtype=torch.float64)
