"""Patterns: what they accept, and that they remove exactly what they say."""

from fractions import Fraction
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcompress.errors import BadInput
from llmcompress.kernels import nm_keep
from llmcompress.sparsity import NM, Unstructured, parse


@pytest.mark.parametrize(
    ("text", "pattern"),
    [("2:4", NM(2, 4)), (" 1:4 ", NM(1, 4)), ("4:8", NM(4, 8)), ("0.5", Unstructured(Fraction(1, 2))),
     (0.29, Unstructured(Fraction(29, 100))), (0, Unstructured(Fraction(0))), ("1/3", Unstructured(Fraction(1, 3)))],
)  # fmt: skip
def test_parse(text, pattern):
    assert parse(text) == pattern


@pytest.mark.parametrize(
    "text", ["1.5", "1", "-0.1", "3:2", "4:4", "0:4", "2:", ":4", "-1:4", "a:b", "half", "", "nan"]
)
def test_parse_refuses_naming_the_value(text):
    with pytest.raises(BadInput) as error:
        parse(text)
    assert text in str(error.value) and "n being the number kept" in str(error.value)


def test_share_is_what_is_removed():
    assert [float(parse(text).share) for text in ("2:4", "1:4", "3:4", "0.3")] == [0.5, 0.75, 0.25, 0.3]


def test_two_of_four_on_known_rows():
    row = torch.tensor([[1.0, -4, 3, 2, 5, 5, 5, 5]])
    keep = NM(2, 4).keep(row.abs())
    assert keep[0, :4].tolist() == [False, True, True, False]
    assert keep[0, 4:].sum() == 2


def test_groups_lie_along_the_inputs():
    weight = torch.arange(32.0).view(4, 8)
    keep = NM(2, 4).keep(weight)
    assert keep.tolist() == [[False, False, True, True] * 2] * 4


def test_ties_are_not_over_pruned():
    equal = torch.ones(10, 10)
    for scope in ("row", "matrix"):
        assert int((~Unstructured(Fraction(1, 2)).keep(equal, scope)).sum()) == 50
    assert parse(0.29).zeros(100) == 29


def test_misfit_and_holds():
    assert "not divisible by 4" in NM(2, 4).misfit(10)
    assert NM(2, 4).misfit(12) is None and parse(0.5).misfit(7) is None
    assert NM(2, 4).holds(torch.tensor([[0.0, 1, 0, 2]])) and not NM(2, 4).holds(torch.tensor([[3.0, 1, 0, 2]]))
    assert parse(0.5).holds(torch.tensor([[0.0, 1]])) and not parse(0.5).holds(torch.tensor([[3.0, 1]]))


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 8), st.data())
def test_nm_keeps_the_largest_of_each_group(m, data):
    n = data.draw(st.integers(1, m - 1))
    values = data.draw(st.lists(st.integers(0, 4), min_size=3 * m, max_size=3 * m))
    score = torch.tensor(values, dtype=torch.float32).view(1, -1)
    groups, kept = score.view(3, m), nm_keep(score, n, m).view(3, m)
    assert (kept.sum(1) == n).all()
    for group, keep in zip(groups, kept, strict=True):
        best = max(float(group[list(chosen)].sum()) for chosen in combinations(range(m), n))
        assert float(group[keep].sum()) == best


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 7),
    st.integers(1, 9),
    st.fractions(0, Fraction(99, 100)),
    st.sampled_from(["row", "matrix"]),
    st.data(),
)
def test_unstructured_drops_exactly_the_smallest(rows, columns, share, scope, data):
    values = data.draw(st.lists(st.integers(0, 5), min_size=rows * columns, max_size=rows * columns))
    score = torch.tensor(values, dtype=torch.float32).view(rows, columns)
    pattern = Unstructured(share)
    keep = pattern.keep(score, scope)
    assert int((~keep).sum()) == round(share * rows * columns)
    parts = [(score, keep)] if scope == "matrix" else zip(score, keep, strict=True)
    for part, mask in parts:
        if mask.any() and (~mask).any():
            assert part[mask].min() >= part[~mask].max()
    if scope == "row":
        counts = (~keep).sum(1)
        assert counts.max() - counts.min() <= 1
