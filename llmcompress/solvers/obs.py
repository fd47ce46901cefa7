"""Column-by-column pruning with optimal compensation (SparseGPT, arXiv 2301.00774, on OBS and GPTQ's ordering)."""

from __future__ import annotations

import torch

from llmcompress.errors import NumericalFailure
from llmcompress.sparsity import NM, Pattern

MAX_DAMP_STEPS, LEAST_DAMP = 8, 1e-6


def inverse_factor(gram: torch.Tensor, damp: float) -> torch.Tensor:
    """Upper U (n, n) with U^T U = (H + damp * mean(diag H) * I)^-1, dead inputs given a unit diagonal.

    Damping grows tenfold until the factorisation succeeds. Raises NumericalFailure when it never does.
    """
    n = len(gram)
    diagonal = gram.diagonal()
    mean = diagonal.mean().clamp(min=torch.finfo(gram.dtype).tiny)
    for step in range(MAX_DAMP_STEPS):
        if step:
            damp = max(10 * damp, LEAST_DAMP)
        damped = gram.clone()
        damped.diagonal().copy_(torch.where(diagonal > 0, diagonal + damp * mean, mean))
        # One name for all, so that no more than two such matrices are in memory beside the Gram matrix.
        work, failed = torch.linalg.cholesky_ex(damped)
        del damped
        if not failed:
            work = torch.cholesky_inverse(work)
            work, failed = torch.linalg.cholesky_ex(work, upper=True)
        if not failed and work.isfinite().all():
            return work
    raise NumericalFailure(f"the {n} x {n} Gram matrix can't be inverted even with damping {damp:g}")


def sparsegpt(
    weights: list[torch.Tensor], factor: torch.Tensor, pattern: Pattern, block: int = 128
) -> list[torch.Tensor]:
    """Prunes matrices that share one input, left to right, each removed weight's error moved into those after it.

    weights: W (m_i, n) each, any float dtype; factor: U (n, n) of `inverse_factor`; block: columns between two
    updates of the rest. n:m masks are chosen group by group from the compensated weights, unstructured ones block by
    block over all rows of a matrix, exactly as many as the pattern asks of the matrix. Returns new (m_i, n).
    """
    rows = [len(w) for w in weights]
    columns = len(factor)
    # Transposed, so that a column of W, and the block of columns still to correct, are contiguous.
    work = torch.cat(weights).to(factor).T.contiguous()  # (n, sum of m_i)
    if isinstance(pattern, NM):
        block = max(block // pattern.m, 1) * pattern.m
    for start in range(0, columns, block):
        end = min(start + block, columns)
        inner = factor[start:end, start:end]
        part = work[start:end]  # (b, M), a view
        errors = torch.empty_like(part)
        keep = None if isinstance(pattern, NM) else _block_mask(part, inner, rows, pattern, start, end)
        for j in range(end - start):
            if isinstance(pattern, NM):
                if j % pattern.m == 0:
                    group = slice(j, j + pattern.m)
                    score = (part[group] / inner.diagonal()[group, None]).square()
                    group_keep = pattern.keep(score.T).T
                kept = group_keep[j % pattern.m]
            else:
                kept = keep[j]
            error = part[j].masked_fill(kept, 0.0) / inner[j, j]  # (M,)
            part[j].masked_fill_(~kept, 0.0)
            errors[j] = error
            if j + 1 < end - start:
                part[j + 1 :].addr_(inner[j, j + 1 :], error, alpha=-1)
        work[end:].addmm_(factor[start:end, end:].T, errors, alpha=-1)
    return [w.T.contiguous() for w in work.split(rows, dim=1)]


def _block_mask(part, inner, rows, pattern, start, end) -> torch.Tensor:
    """Keep mask (b, M) of one block: each matrix gets its share of zeros up to this column, exactly."""
    score = (part / inner.diagonal()[:, None]).square()
    keep = torch.ones_like(score, dtype=torch.bool)
    for mask, s in zip(keep.split(rows, dim=1), score.split(rows, dim=1), strict=True):
        count = pattern.zeros(end * s.shape[1]) - pattern.zeros(start * s.shape[1])
        drop = s.flatten().topk(count, largest=False, sorted=False).indices
        mask[drop // s.shape[1], drop % s.shape[1]] = False
    return keep
