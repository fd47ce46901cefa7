"""Peak memory of a run does not grow with the number of layers, and stays under what it was given."""

import json
import subprocess
import sys

import pytest
import tiny

import llmcompress
from llmcompress import budget
from llmcompress.errors import BadInput

MIB = 2**20
WIDE = {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 8}
LAYER = (4 * 768 * 768 + 3 * 768 * 2048) * 4  # bytes of one decoder layer's matrices in float32

SCRIPT = """
import json, resource, sys, torch, llmcompress
torch.set_num_threads(1)
model, out, text, method, perplexity = sys.argv[1:]
quick = {"rounds": 1, "iterations": 1, "refit_steps": 1, "warm_start": "wanda"} if method == "fista" else {}
result = llmcompress.prune(
    model, method, "2:4", out, llmcompress.Calibration(text, 8, 64), perplexity=perplexity or None, **quick
)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"peak": peak, "reported": result.layers[-1]["peak_memory"]}))
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("wide")
    return {count: tiny.save("llama", root / str(count), num_hidden_layers=count, **WIDE) for count in (4, 16)}


def peak(model, out, text, method, perplexity=""):
    command = [sys.executable, "-c", SCRIPT, str(model), str(out), str(text), method, str(perplexity)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert 0 <= found["peak"] - found["reported"] < 300 * MIB
    return found["peak"]


@pytest.mark.parametrize(("method", "evaluates"), [("wanda", False), ("fista", True)])
def test_four_and_sixteen_layers_need_the_same(method, evaluates, models, tmp_path, text):
    few, many = (
        peak(models[count], tmp_path / str(count), text, method, text if evaluates else "") for count in (4, 16)
    )
    # Twelve more layers would be 324 MiB.
    assert many - few < 5 * LAYER, f"{few / MIB:.0f} MiB and {many / MIB:.0f} MiB"


@pytest.mark.parametrize("correction", ["layer", "sequential", "model", "off"])
@pytest.mark.parametrize(("lockstep", "in_memory"), [(False, True), (False, False)])
def test_lean_ways_give_the_same_bits(lockstep, in_memory, correction, llama, tmp_path, text, monkeypatch):
    calibration = llmcompress.Calibration(str(text), 12, 32)
    settings = {"calibration": calibration, "error_correction": correction, "perplexity": str(text)}
    monkeypatch.setattr("llmcompress.pipeline.BATCH_TOKENS", 5 * 32)
    one = llmcompress.prune(llama, "fista", "2:4", tmp_path / "free", **settings)
    monkeypatch.setattr(budget, "plan", lambda *given: budget.Plan(lockstep, in_memory, 1, 2))
    two = llmcompress.prune(llama, "fista", "2:4", tmp_path / "lean", **settings)
    for path in (tmp_path / "free").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "lean" / path.name).read_bytes()
    assert one.perplexity == two.perplexity


@pytest.mark.parametrize(
    ("text", "size"), [("4GiB", 4 * 2**30), ("900M", 900 * MIB), ("1.5gb", 3 * 2**29), ("2048", 2048), (17, 17)]
)
def test_sizes(text, size):
    assert budget.parse_bytes(text) == size
    assert budget.parse_bytes(None) is None


@pytest.mark.parametrize("text", ["lots", "-1GiB", "0", "4XB", ""])
def test_bad_sizes_are_named(text):
    with pytest.raises(BadInput, match="--max-memory.*4GiB"):
        budget.parse_bytes(text)


def plan(folder, limit, method="fista", tokens=10**6, **over):
    from llmcompress import methods, sparsity
    from llmcompress.checkpoint.skeleton import Skeleton
    from llmcompress.checkpoint.source import open_source
    from llmcompress.layerwise import Work

    module = methods.find(method)
    work = Work(method, module.Options(), sparsity.parse("2:4"), over.get("correction", module.ERROR_CORRECTION), ())
    return budget.plan(Skeleton(open_source(folder)), work, tokens, 4096, limit)


def test_the_plan_gets_leaner_with_the_limit(models):
    base = budget.resident()
    plans = [plan(models[4], base + gib * 2**30) for gib in (200, 9, 3)]
    assert [(p.lockstep, p.in_memory) for p in plans] == [(True, True), (False, True), (False, False)]
    assert all(p.need <= p.limit for p in plans)


def test_too_little_for_one_layer_is_said_before_anything_starts(models):
    with pytest.raises(BadInput) as error:
        plan(models[4], 100 * MIB)
    for word in ("--max-memory 0.10 GiB", "one layer", "needs", "weights", "statistics and solver", "fista"):
        assert word in str(error.value)
