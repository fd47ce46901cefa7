"""SparseGPT against a slow textbook version; the refit against exact least squares."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcompress.errors import NumericalFailure
from llmcompress.solvers.obs import inverse_factor, sparsegpt
from llmcompress.solvers.refit import masked_refit
from llmcompress.sparsity import parse

D = torch.float64


def setting(seed=0, m=6, n=24, p=200):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(p, n, generator=g, dtype=D) @ (
        torch.eye(n, dtype=D) + 0.3 * torch.randn(n, n, generator=g, dtype=D)
    )
    return torch.randn(m, n, generator=g, dtype=D), x.T @ x


def textbook(weight, gram, pattern, damp, block):
    """Optimal brain surgeon, one column after the other, with the inverse of what is left computed anew each time."""
    n = len(gram)
    gram = gram + damp * gram.diagonal().mean() * torch.eye(n, dtype=D)
    weight, keep = weight.clone(), torch.ones(weight.shape, dtype=torch.bool)
    for j in range(n):
        left = torch.linalg.inv(gram[j:, j:])  # inverse over the columns not yet fixed
        if hasattr(pattern, "m"):
            if j % pattern.m == 0:
                score = torch.stack(
                    [weight[:, j + k] ** 2 / torch.linalg.inv(gram[j + k :, j + k :])[0, 0] for k in range(pattern.m)],
                    1,
                )
                keep[:, j : j + pattern.m] = pattern.keep(score)
        elif j % block == 0:
            end = min(j + block, n)
            score = torch.stack([weight[:, k] ** 2 / torch.linalg.inv(gram[k:, k:])[0, 0] for k in range(j, end)], 1)
            rows = len(weight)
            count = pattern.zeros(end * rows) - pattern.zeros(j * rows)
            drop = score.flatten().argsort()[:count]
            keep[drop // score.shape[1], j + drop % score.shape[1]] = False
        error = torch.where(keep[:, j], 0.0, weight[:, j]) / left[0, 0]
        weight[:, j:] -= error[:, None] * left[0]
        weight[:, j] = torch.where(keep[:, j], weight[:, j], 0.0)
    return weight


@pytest.mark.parametrize(
    ("pattern", "n", "block"),
    [("2:4", 24, 8), ("2:4", 24, 128), ("3:5", 30, 8), ("1:4", 24, 12), ("0.5", 24, 8), ("0.3", 25, 7)],
)
def test_sparsegpt_equals_the_textbook(pattern, n, block):
    weight, gram = setting(n=n)
    pattern = parse(pattern)
    (fast,) = sparsegpt([weight], inverse_factor(gram, 0.01), pattern, block)
    slow = textbook(weight, gram, pattern, 0.01, block)
    assert torch.equal(fast != 0, slow != 0)
    assert (fast - slow).abs().max() < 1e-9
    assert pattern.holds(fast) and int((fast == 0).sum()) == round(pattern.share * fast.numel())


def test_matrices_that_share_an_input_are_pruned_as_if_alone():
    one, gram = setting(1)
    two, _ = setting(2, m=3)
    factor = inverse_factor(gram, 0.01)
    for pattern in (parse("2:4"), parse("0.5")):
        together = sparsegpt([one, two], factor, pattern)
        for matrix, result in zip((one, two), together, strict=True):
            assert torch.allclose(result, sparsegpt([matrix], factor, pattern)[0], atol=1e-12)


def test_compensation_beats_the_mask_alone():
    weight, gram = setting(3)
    (pruned,) = sparsegpt([weight], inverse_factor(gram, 0.01), parse("2:4"))
    error = lambda v: float((((v - weight) @ gram) * (v - weight)).sum())  # noqa: E731
    assert error(pruned) < 0.8 * error(weight * (pruned != 0))


def test_singular_gram_is_damped_until_it_factorises():
    x = torch.randn(4, 16)
    factor = inverse_factor(x.T @ x, 0.0)
    assert factor.isfinite().all()
    dead = x.T @ x
    dead[3] = dead[:, 3] = 0
    assert inverse_factor(dead, 0.01).isfinite().all()


def test_gram_that_can_not_be_factorised_is_named():
    with pytest.raises(NumericalFailure, match="8 x 8 Gram matrix"):
        inverse_factor(torch.full((8, 8), float("nan")), 0.01)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.2, 0.8))
def test_refit_is_exact_least_squares_on_the_mask(seed, density):
    weight, gram = setting(seed, m=4, n=12)
    target = weight @ gram + torch.randn_like(weight)
    keep = torch.rand(weight.shape, generator=torch.Generator().manual_seed(seed)) < density
    refit = masked_refit(gram, target, weight, keep, steps=200, tolerance=1e-14)
    assert (refit[~keep] == 0).all()
    for row in range(len(weight)):
        on = keep[row]
        if on.any():
            exact = torch.linalg.solve(gram[on][:, on], target[row, on])
            assert torch.allclose(refit[row, on], exact, rtol=1e-6, atol=1e-8)


def test_refit_never_gets_worse_with_more_steps():
    weight, gram = setting(5)
    target = weight @ gram + torch.randn_like(weight)
    keep = torch.rand_like(weight) < 0.5
    value = lambda v: float((((v @ gram) - 2 * target) * v).sum())  # noqa: E731
    values = [value(weight * keep)] + [value(masked_refit(gram, target, weight, keep, steps=k)) for k in range(1, 12)]
    assert all(b <= a + 1e-9 for a, b in zip(values, values[1:], strict=False))
    assert values[-1] < values[0]
