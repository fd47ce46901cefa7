"""FISTA against closed forms and its own theory, in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcompress.solvers.fista import fista, lambda_max, lipschitz, squared_errors

D = torch.float64


def problem(seed=0, m=5, n=8, p=64, noise=0.3):
    """W (m, n), X and X* (p, n) as inputs in rows, H and C."""
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(m, n, generator=g, dtype=D)
    x = torch.randn(p, n, generator=g, dtype=D)
    star = x + noise * torch.randn(p, n, generator=g, dtype=D)
    return w, x, star, star.T @ star, w @ x.T @ star


def top(gram):
    return float(torch.linalg.eigvalsh(gram)[-1])


def objective(v, gram, target, penalty):
    return float(0.5 * ((v @ gram) * v).sum() - (v * target).sum() + penalty * v.abs().sum())


def test_without_penalty_it_is_the_least_squares_solution_on_the_compressed_inputs():
    w, _, _, gram, target = problem()
    v = fista(gram, target, w, 0.0, top(gram), 5000, 1e-16)
    assert (v - torch.linalg.solve(gram, target.T).T).abs().max() < 1e-10
    assert (v - w).abs().max() > 0.05


def test_one_step_moves_off_the_dense_weights_when_inputs_differ():
    w, _, _, gram, target = problem()
    step = fista(gram, target, w, 0.0, top(gram), 1)
    assert torch.allclose(step, w - (w @ gram - target) / top(gram), atol=1e-12)
    assert (step - w).abs().max() > 1e-3


@pytest.mark.parametrize("iterations", [1, 2, 7, 40])
def test_dense_weights_are_a_fixed_point_when_inputs_agree(iterations):
    w, x, *_ = problem()
    gram = x.T @ x
    assert (fista(gram, w @ gram, w, 0.0, top(gram), iterations) - w).abs().max() < 1e-12


@pytest.mark.parametrize(("penalty", "expected"), [(1.0, 1.25), (6.0, 0.0), (0.0, 1.5)])
def test_scalar_with_unequal_inputs(penalty, expected):
    # W = 3, X = 1, X* = 2: minimise (2v - 3)^2 / 2 + penalty |v|.
    v = fista(torch.tensor([[4.0]], dtype=D), torch.tensor([[6.0]], dtype=D), torch.zeros(1, 1, dtype=D), penalty, 4.0)
    assert float(v) == pytest.approx(expected, abs=1e-9)


def test_diagonal_gram():
    gram = torch.diag(torch.tensor([1.0, 4, 9, 16], dtype=D))
    target = torch.tensor([[2.0, 8, 18, 32]], dtype=D)
    v = fista(gram, target, torch.zeros(1, 4, dtype=D), 4.0, 16.0, 4000, 1e-16)
    assert (v - torch.tensor([[0, 1, 14 / 9, 7 / 4]], dtype=D)).abs().max() < 1e-9


@pytest.mark.parametrize("penalty", [8.0, 15.0, 30.0])
def test_optimality_conditions_hold_at_convergence(penalty):
    w, _, _, gram, target = problem(3)
    v = fista(gram, target, w, penalty, top(gram), 20_000, 1e-17)
    slope, tolerance = v @ gram - target, 1e-8 * float(target.abs().max())
    alive = v != 0
    assert alive.any() and (~alive).any()
    assert (slope + penalty * v.sign())[alive].abs().max() <= tolerance
    assert slope[~alive].abs().max() <= penalty + tolerance


def test_largest_useful_penalty():
    w, _, _, gram, target = problem(4)
    limit = lambda_max(target)
    start = torch.zeros_like(w)
    assert (fista(gram, target, start, limit, top(gram), 200) == 0).all()
    below = fista(gram, target, start, limit * 0.99, top(gram), 200)
    assert (below != 0).any(dim=1).all()


def test_momentum_of_the_first_three_steps():
    gram, target = torch.diag(torch.tensor([1.0, 4], dtype=D)), torch.tensor([[1.0, 4]], dtype=D)
    start = torch.zeros(1, 2, dtype=D)
    first = [float(fista(gram, target, start, 0.0, 4.0, k)[0, 0]) for k in (1, 2, 3)]
    assert first == pytest.approx([0.25, 0.4375, 0.61774659], abs=1e-8)


@pytest.mark.parametrize("steps", [1, 5, 20, 50])
def test_convergence_rate(steps):
    w, _, _, gram, target = problem(5)
    penalty, bound = 3.0, top(gram)
    best = fista(gram, target, w, penalty, bound, 20_000, 1e-17)
    start = torch.zeros_like(w)
    gap = objective(fista(gram, target, start, penalty, bound, steps, 0.0), gram, target, penalty)
    gap -= objective(best, gram, target, penalty)
    assert -1e-9 <= gap <= 2 * bound * float((start - best).square().sum()) / (steps + 1) ** 2 + 1e-9


def test_too_small_a_bound_breaks_the_rate():
    w, _, _, gram, target = problem(5)
    v = fista(gram, target, torch.zeros_like(w), 0.0, top(gram) / 2.5, 200, 0.0)
    assert not v.abs().max() < 1e3


def test_squared_error_from_gram_matrices_is_that_of_the_outputs():
    w, x, star, gram, target = problem(6)
    v = w + 0.1 * torch.randn_like(w)
    energy = ((w @ x.T) ** 2).sum(1)
    direct = ((v @ star.T - w @ x.T) ** 2).sum(1)
    assert torch.allclose(squared_errors(v, gram, target, energy), direct, rtol=1e-9)


def test_rows_are_independent():
    w, _, _, gram, target = problem(7)
    penalty = torch.rand(len(w), 1, dtype=D) * 5
    together = fista(gram, target, w, penalty, top(gram), 25, 0.0)
    for i in range(len(w)):
        alone = fista(gram, target[i : i + 1], w[i : i + 1], penalty[i : i + 1], top(gram), 25, 0.0)
        assert torch.allclose(together[i : i + 1], alone, atol=1e-12)


def test_order_of_inputs_does_not_matter():
    w, _, _, gram, target = problem(8)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    plain = fista(gram, target, w, 2.0, top(gram), 30)
    moved = fista(gram[order][:, order], target[:, order], w[:, order], 2.0, top(gram), 30)
    assert torch.allclose(plain[:, order], moved, atol=1e-12)


def test_scaling_of_the_inputs_scales_the_penalty_by_its_square():
    w, _, _, gram, target = problem(9)
    plain = fista(gram, target, w, 2.0, top(gram), 30)
    scaled = fista(gram * 49, target * 49, w, 2.0 * 49, top(gram) * 49, 30)
    assert torch.allclose(plain, scaled, atol=1e-12)


def test_zero_gram_keeps_the_start():
    w = torch.randn(2, 4)
    assert torch.equal(fista(torch.zeros(4, 4), torch.zeros(2, 4), w, 1.0, 0.0), w)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 60), st.integers(0, 10_000))
def test_lipschitz_is_never_below_the_largest_eigenvalue(n, p, seed):
    x = torch.randn(p, n, generator=torch.Generator().manual_seed(seed))
    x = x * torch.logspace(-3, 2, n)
    gram = x.T @ x
    exact = float(torch.linalg.eigvalsh(gram.double())[-1])
    assert exact * (1 - 1e-5) <= lipschitz(gram) <= exact * 1.05 + 1e-12
