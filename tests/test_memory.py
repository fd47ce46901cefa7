"""Peak memory of a run does not grow with the number of layers, and stays under what it was given."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import tiny
import torch
from safetensors.torch import save_file

import llmcompress
from llmcompress import budget
from llmcompress.errors import BadInput

MIB = 2**20
WIDTH = 1024
LAYER = 7 * WIDTH**2 * 4  # bytes of one decoder layer's matrices in float32
# What glibc keeps of memory that was given back differs from run to run; what a run holds does not.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "3000000", "OMP_NUM_THREADS": "1"}

SCRIPT = """
import json, sys, llmcompress
model, out, text, method, perplexity, options = sys.argv[1:]
seen = []
result = llmcompress.prune(
    model, method, "2:4", out, llmcompress.Calibration(text, 2, 64), perplexity=perplexity or None,
    on_event=lambda kind, data: seen.append(data) if kind == "start" else None, **json.loads(options)
)
# Of this process alone: ru_maxrss begins with what the parent had.
with open("/proc/self/status") as file:
    peak = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
print(json.dumps({"peak": peak, "planned": seen[0]["memory_needed"], "reported": result.layers[-1]["peak_memory"]}))
"""


def save_wide(folder, layers):
    """A Llama of equal layers, one in each file, without ever holding more than one of them."""
    config = tiny.CONFIGS["llama"](
        hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=layers, num_key_value_heads=4,
        dtype=torch.float32, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    linears = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    layer = {f"{name}.weight": torch.randn(WIDTH, WIDTH, generator=generator) * 0.02 for name in linears}
    layer |= {f"{name}_layernorm.weight": torch.ones(WIDTH) for name in ("input", "post_attention")}
    files = {
        f"model-{i:05d}.safetensors": {f"model.layers.{i}.{name}": tensor for name, tensor in layer.items()}
        for i in range(layers)
    }
    table = torch.randn(tiny.VOCABULARY, WIDTH, generator=generator)
    files["model-other.safetensors"] = {
        "model.embed_tokens.weight": table, "lm_head.weight": table / 30, "model.norm.weight": torch.ones(WIDTH),
    }  # fmt: skip
    weight_map = {}
    for name, tensors in files.items():
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("wide")
    yield {count: save_wide(root / str(count), count) for count in (4, 16)}
    shutil.rmtree(root)


def measure(model, out, text, method, perplexity, options):
    command = [sys.executable, "-c", SCRIPT, model, out, text, method, perplexity, json.dumps(options)]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env={**os.environ, **ENVIRONMENT})
    assert done.returncode == 0, done.stderr
    shutil.rmtree(out)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["reported"] <= found["peak"] <= found["planned"]
    return found["peak"]


# One linear of each layer for FISTA, which would take long on all; the layer is held, and measured, all the same.
FISTA = {"rounds": 1, "iterations": 1, "refit_steps": 1, "targets": ["self_attn.o_proj"]}


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="peak memory is read from /proc")
@pytest.mark.parametrize(
    ("method", "evaluates", "options"),
    [("wanda", True, {}), ("fista", False, FISTA)],
    ids=["wanda and perplexity", "fista"],
)
def test_sixteen_layers_need_what_four_need(method, evaluates, options, models, tmp_path, text):
    short = tiny.write_text(tmp_path / "short.txt", 300) if evaluates else ""
    few, many = (measure(models[n], tmp_path / "out", text, method, short, options) for n in (4, 16))
    # Twelve more layers would be 336 MiB.
    assert many - few < LAYER, f"{few / MIB:.0f} MiB and {many / MIB:.0f} MiB"


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="peak memory is read from /proc")
def test_peak_is_of_this_process_alone():
    ballast = torch.ones(200 * MIB)
    script = "from llmcompress import budget; print(budget.peak())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert 10 * MIB < int(done.stdout) < ballast.numel() * ballast.element_size()


@pytest.mark.parametrize("correction", ["layer", "sequential", "model", "off"])
@pytest.mark.parametrize(("lockstep", "in_memory"), [(False, True), (False, False)])
def test_lean_ways_give_the_same_bits(lockstep, in_memory, correction, llama, tmp_path, text, monkeypatch):
    calibration = llmcompress.Calibration(str(text), 12, 32)
    short = tiny.write_text(tmp_path / "short.txt", 300)
    settings = {"calibration": calibration, "error_correction": correction, "perplexity": str(short)}
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
