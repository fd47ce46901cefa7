"""Statistics of inputs against float64."""

import pytest
import torch

from llmcompress.calibration import stats as module
from llmcompress.calibration.stats import Statistics
from llmcompress.errors import NumericalFailure

ALL = frozenset({"norms", "gram", "cross"})


@pytest.mark.parametrize("batches", [1, 7])
@pytest.mark.parametrize("n", [10, 50])
def test_sums_equal_float64(batches, n, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 16)
    x, star = torch.randn(70, n), torch.randn(70, n)
    stats = Statistics(ALL)
    for part, part_star in zip(x.chunk(batches), star.chunk(batches), strict=True):
        stats.add(part, part_star, same=False)
    assert stats.tokens == 70
    x, star = x.double(), star.double()
    for found, exact in ((stats.gram, star.T @ star), (stats.cross, x.T @ star), (stats.norms, star.square().sum(0))):
        assert torch.allclose(found.double(), exact, rtol=1e-5, atol=1e-4)
    assert torch.equal(stats.gram, stats.gram.T)


def test_one_stream_needs_one_product():
    x = torch.randn(20, 6)
    stats = Statistics(ALL)
    stats.add(x, x, same=True)
    assert stats.cross is stats.gram
    assert set(stats.sums) == {"norms", "whole gram"}


def test_half_precision_inputs_are_summed_in_float32():
    x = torch.full((5000, 2), 1.0, dtype=torch.bfloat16)
    stats = Statistics(ALL)
    for part in x.split(100):
        stats.add(part, part, same=True)
    # bfloat16 sums would stop at 256.
    assert float(stats.gram[0, 1]) == 5000


def test_only_what_is_needed_is_kept():
    x = torch.randn(5, 3)
    stats = Statistics(frozenset({"norms"}))
    stats.add(x, x, same=True)
    assert set(stats.sums) == {"norms"}
    nothing = Statistics(frozenset())
    nothing.add(x, x, same=True)
    assert nothing.sums == {} and nothing.sample is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_numbers_that_break_down_name_the_place(bad):
    x = torch.ones(4, 3)
    x[2, 1] = bad
    stats = Statistics(ALL)
    stats.add(x, x, same=True)
    with pytest.raises(NumericalFailure, match="layer 3 q_proj.*4 calibration tokens"):
        stats.check_finite("layer 3 q_proj")
