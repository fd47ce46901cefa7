"""Methods on one group of matrices: patterns, guards, options."""

import copy
import dataclasses

import pytest
import torch

from llmcompress import methods
from llmcompress.calibration.stats import Statistics
from llmcompress.clock import Clock
from llmcompress.errors import BadInput
from llmcompress.sparsity import parse

ALL = {"norms", "gram", "cross"}


def group(seed=0, n=32, tokens=200, noise=0.1, dead=False):
    """Two matrices with a common input, and the statistics of correlated tokens in both streams."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, n, generator=g) @ (torch.eye(n) + 0.4 * torch.randn(n, n, generator=g))
    star = x + noise * torch.randn(tokens, n, generator=g)
    if dead:
        star[:, 5] = 0
    stats = Statistics(frozenset(ALL))
    stats.add(x, star if noise else x, same=not noise)
    weights = {"a": torch.randn(12, n, generator=g), "b": torch.randn(5, n, generator=g)}
    return weights, stats, x, star


def run(method, weights, stats, pattern, **options):
    module = methods.find(method)
    stats = copy.deepcopy(stats)  # a method may use them up
    return module.prune(weights, stats, parse(pattern), methods.make_options(method, options), Clock())


@pytest.mark.parametrize("pattern", ["2:4", "1:4", "3:4", "5:8", "0.5", "0.29"])
@pytest.mark.parametrize("method", list(methods.MODULES))
def test_exact_pattern(method, pattern):
    weights, stats, *_ = group()
    shape = parse(pattern)
    for name, pruned in run(method, weights, stats, pattern).items():
        assert pruned.shape == weights[name].shape
        assert shape.holds(pruned)
        assert int((pruned == 0).sum()) == round(shape.share * pruned.numel())


def test_wanda_by_hand():
    stats = Statistics(frozenset({"norms"}))
    x = torch.tensor([[1.0, 10, 1, 1], [1, 10, 1, 2]])
    stats.add(x, x, same=True)
    pruned = run("wanda", {"w": torch.tensor([[5.0, -1, 4, 3]])}, stats, "2:4")["w"]
    # Scores 5*1.41, 1*14.1, 4*1.41, 3*2.24.
    assert pruned.tolist() == [[5.0, -1.0, 0.0, 0.0]]


def test_magnitude_by_hand():
    assert run("magnitude", {"w": torch.tensor([[5.0, -1, 4, 3]])}, None, "2:4")["w"].tolist() == [[5.0, 0, 4, 0]]


def error(v, weight, x, star):
    return float((v @ star.T - weight @ x.T).square().sum())


@pytest.mark.parametrize("dead", [False, True])
@pytest.mark.parametrize("pattern", ["2:4", "0.5"])
@pytest.mark.parametrize("refit", [False, True])
@pytest.mark.parametrize("warm_start", ["sparsegpt", "wanda", "magnitude", "dense"])
def test_fista_is_never_worse_than_its_rounded_warm_start(warm_start, refit, pattern, dead):
    weights, stats, x, star = group(1, dead=dead)
    options = {"warm_start": warm_start, "ridge": 0.0, "refit": refit}
    start = run("fista", weights, stats, pattern, rounds=0, **{**options, "refit": False})
    found = run("fista", weights, stats, pattern, rounds=6, iterations=15, **options)
    for name, weight in weights.items():
        assert found[name].isfinite().all()
        before, after = (error(v[name], weight, x, star) for v in (start, found))
        assert after <= before * (1 + 1e-5)
        assert after < 0.99 * before


def test_search_or_refit_leaves_the_magnitude_choice_where_inputs_are_alike():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(400, 4, generator=g)
    x[:, 1] = x[:, 0] + 0.05 * torch.randn(400, generator=g)
    stats = Statistics(frozenset(ALL))
    stats.add(x, x, same=True)
    weights = {"w": torch.tensor([[1.0, 0.9, 0.8, 0.7]])}
    magnitude = run("magnitude", weights, stats, "2:4")["w"]
    found = run("fista", weights, stats, "2:4", ridge=0.0)["w"]
    assert magnitude.nonzero()[:, 1].tolist() == [0, 1]
    assert error(found, weights["w"], x, x) < 0.6 * error(magnitude, weights["w"], x, x)


@pytest.mark.parametrize("method", list(methods.MODULES))
def test_nothing_to_remove_changes_nothing(method):
    weights, stats, *_ = group(2, noise=0.0)
    for name, pruned in run(method, weights, stats, "0").items():
        assert torch.allclose(pruned, weights[name], atol=1e-3), (pruned - weights[name]).abs().max()


def test_error_correction_aims_at_the_dense_output_on_compressed_inputs():
    weights, stats, x, star = group(3, noise=0.5)
    corrected = run("fista", weights, stats, "2:4", ridge=0.0)
    blind = Statistics(frozenset(ALL))
    blind.add(star, star, same=True)
    uncorrected = run("fista", weights, blind, "2:4", ridge=0.0)
    for name, weight in weights.items():
        assert error(corrected[name], weight, x, star) < 0.98 * error(uncorrected[name], weight, x, star)


def test_row_blocks_do_not_change_the_result(monkeypatch):
    weights, stats, *_ = group(4)
    whole = run("fista", weights, stats, "2:4")
    monkeypatch.setattr(methods.find("fista"), "BLOCK", 32 * 5)
    for name, pruned in run("fista", weights, stats, "2:4").items():
        assert torch.allclose(pruned, whole[name], atol=1e-4)
        assert torch.equal(pruned != 0, whole[name] != 0)


def test_unknown_method_names_the_nearest():
    with pytest.raises(BadInput, match="unknown method 'fist', did you mean fista.*methods: fista, sparsegpt"):
        methods.find("fist")


def test_option_of_another_method_names_its_owner():
    with pytest.raises(BadInput, match="--damp is no option of wanda; it belongs to sparsegpt"):
        methods.make_options("wanda", {"damp": 0.1})
    with pytest.raises(BadInput, match="--nonsense is no option of fista; no method has it"):
        methods.make_options("fista", {"nonsense": 1})


@pytest.mark.parametrize("method", list(methods.MODULES))
def test_option_out_of_range_is_refused(method):
    for field in dataclasses.fields(methods.find(method).Options):
        bad = None
        if "choices" in field.metadata:
            bad = "elsewhere"
        elif "least" in field.metadata:
            bad = type(field.default)(field.metadata["least"] - 1)
        if bad is not None:
            with pytest.raises(BadInput, match=f"--{field.name.replace('_', '-')} {bad}: use "):
                methods.make_options(method, {field.name: bad})


@pytest.mark.parametrize("method", list(methods.MODULES))
def test_every_option_has_help(method):
    for field in dataclasses.fields(methods.find(method).Options):
        assert field.metadata["help"]
