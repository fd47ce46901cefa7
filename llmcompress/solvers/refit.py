"""Least squares on a fixed mask: min ||V X*^T - W X^T||^2 over V that vanish outside it, all rows at once."""

from __future__ import annotations

import torch


def masked_refit(
    gram: torch.Tensor,
    target: torch.Tensor,
    start: torch.Tensor,
    keep: torch.Tensor,
    ridge: float = 0.0,
    anchor: torch.Tensor | None = None,
    steps: int = 30,
    tolerance: float = 1e-6,
) -> torch.Tensor:
    """Conjugate gradients with a Jacobi preconditioner, every row its own system on its own support.

    gram H (n, n), target C (m, n), start and keep (m, n); adds ridge * sum_j H_jj (v_j - anchor_j)^2 to the
    objective, which pulls each weight to `anchor` (m, n) in units of its own input's energy.
    The objective never rises from step to step. Returns V (m, n), exactly zero outside `keep`.
    """
    diagonal = gram.diagonal()
    pull = ridge * diagonal
    scale = torch.where(diagonal > 0, 1 / (diagonal + pull), 0.0)
    value = start * keep
    residual = target - value @ gram
    if ridge:
        residual += pull * (anchor - value)
    residual *= keep
    direction = torch.zeros_like(value)
    before = torch.zeros(len(value), 1, dtype=value.dtype, device=value.device)
    first = None
    for _ in range(steps):
        preconditioned = residual * scale
        now = (residual * preconditioned).sum(1, keepdim=True)
        first = now if first is None else first
        if (now <= tolerance**2 * first).all():
            break
        direction = preconditioned + torch.where(before > 0, now / before, 0.0) * direction
        product = (direction @ gram + (pull * direction if ridge else 0.0)) * keep
        curvature = (direction * product).sum(1, keepdim=True)
        step = torch.where(curvature > 0, now / curvature, 0.0)
        value = value + step * direction
        residual = residual - step * product
        before = now
    return value
