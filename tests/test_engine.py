"""The engine: passes that pause, streams that start where they should, one forward per layer."""

import pytest
import tiny
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import llmcompress
from llmcompress.calibration import engine
from llmcompress.checkpoint.skeleton import Skeleton
from llmcompress.checkpoint.source import open_source
from llmcompress.clock import Clock
from llmcompress.errors import CompressError, NumericalFailure


def calibration(text, samples=16, seq_len=32):
    return llmcompress.Calibration(str(text), samples, seq_len)


def weights(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def run(source, out, text, method="fista", **given):
    llmcompress.prune(source, method, "2:4", out, calibration(text), **given)
    return weights(out)


@pytest.fixture
def small_batches(monkeypatch):
    """Several batches, the last one smaller."""
    monkeypatch.setattr("llmcompress.pipeline.BATCH_TOKENS", 32 * 6)


@pytest.mark.parametrize("correction", ["layer", "sequential", "model", "off"])
@pytest.mark.parametrize("family", ["llama", "opt", "qwen3_moe"])
def test_lockstep_and_batch_by_batch_agree_to_the_bit(family, correction, tmp_path, text, monkeypatch, small_batches):
    source = tiny.save(family, tmp_path / "dense")
    together = run(source, tmp_path / "a", text, error_correction=correction)
    original = engine.run_layer
    monkeypatch.setattr(
        engine, "run_layer", lambda streams, stages, solve, emit, clock, lockstep: original(
            streams, stages, solve, emit, clock, False
        )
    )  # fmt: skip
    apart = run(source, tmp_path / "b", text, error_correction=correction)
    assert all(torch.equal(tensor, apart[name]) for name, tensor in together.items())


@pytest.mark.parametrize(("correction", "passes"), [("sequential", 2), ("layer", 2), ("off", 1)])
def test_each_layer_runs_once_per_stream_and_batch(
    correction, passes, tmp_path, text, llama, monkeypatch, small_batches
):
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    tokens = []
    forward = LlamaDecoderLayer.forward

    def counted(self, hidden_states, *args, **kwargs):
        tokens.append(hidden_states.shape[0] * hidden_states.shape[1])
        return forward(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", counted)
    run(llama, tmp_path / "out", text, error_correction=correction)
    probe = 32
    # Probe: dense and compressed in the run, once more when the written model is verified, once to learn how a
    # layer hands over its output (by each of the two models).
    extra = tokens.count(probe)
    assert extra == 3 * 3 + 2
    assert sum(tokens) - extra * probe == passes * 3 * 16 * 32


def inputs(folder, ids, names):
    model = AutoModelForCausalLM.from_pretrained(folder)
    seen = {}

    def keep(name):
        def hook(module, args):
            seen[name] = args[0].flatten(0, -2)

        return hook

    for name in names:
        model.get_submodule(name).register_forward_pre_hook(keep(name))
    with torch.no_grad():
        model(ids, use_cache=False)
    return seen


@pytest.mark.parametrize("correction", ["layer", "sequential", "model", "off"])
def test_streams_start_where_the_architecture_says(correction, tmp_path, text, llama, monkeypatch):
    caught = {}
    method = llmcompress.methods.find("fista")
    original = method.prune

    def spy(given, stats, pattern, options, clock):
        caught[len(caught)] = (stats.gram.clone(), stats.cross.clone())
        return original(given, stats, pattern, options, clock)

    monkeypatch.setattr(method, "prune", spy)
    drawn = calibration(text)
    ids = drawn.tokens(open_source(llama).tokenizer(), None)
    llmcompress.prune(llama, "fista", "2:4", tmp_path / "out", drawn.drawn(ids), error_correction=correction)
    first, third = "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.gate_proj"
    dense = inputs(llama, ids, (first, third))
    # Layer 1 starts from the compressed layer 0 where streams go through it.
    compressed_model = AutoModelForCausalLM.from_pretrained(llama)
    done = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    if correction != "layer":
        compressed_model.model.layers[0] = done.model.layers[0]
    compressed_model.save_pretrained(tmp_path / "start")
    start = inputs(tmp_path / "start", ids, (first, third))
    compressed_model.model.layers[1].self_attn = done.model.layers[1].self_attn
    compressed_model.save_pretrained(tmp_path / "half")
    half = inputs(tmp_path / "half", ids, (first, third))
    wanted = {
        "layer": (dense[first], dense[first], dense[third], half[third]),
        "sequential": (start[first], start[first], start[third], half[third]),
        "model": (dense[first], start[first], dense[third], half[third]),
        "off": (start[first], start[first], half[third], half[third]),
    }[correction]
    for (gram, cross), (x, star) in ((caught[4], wanted[:2]), (caught[6], wanted[2:])):
        assert torch.allclose(gram, star.T @ star, rtol=1e-4, atol=1e-3)
        assert torch.allclose(cross, x.T @ star, rtol=1e-4, atol=1e-3)
    # The first layer starts from one stream whatever the correction.
    gram, cross = caught[0]
    assert torch.equal(gram, cross)


def test_with_layer_correction_a_layer_alone_gets_the_same_bits(tmp_path, text, llama):
    everything = run(llama, tmp_path / "all", text, error_correction="layer")
    alone = run(llama, tmp_path / "one", text, error_correction="layer", targets=["layers.2.*"])
    source = weights(llama)
    for name, tensor in alone.items():
        assert torch.equal(tensor, (everything if ".layers.2." in name else source)[name]), name


def test_same_seed_same_bits_other_seed_others(tmp_path, text, llama):
    one = run(llama, tmp_path / "a", text)
    two = run(llama, tmp_path / "b", text)
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())
    llmcompress.prune(llama, "fista", "2:4", tmp_path / "c", llmcompress.Calibration(str(text), 16, 32, seed=1))
    other = weights(tmp_path / "c")
    assert any(not torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_targets_leave_the_rest_alone(tmp_path, text, llama):
    out = run(llama, tmp_path / "out", text, targets=["self_attn.*", "layers.0.mlp.up_proj"])
    for name, tensor in weights(llama).items():
        pruned = "self_attn" in name or name.endswith("layers.0.mlp.up_proj.weight")
        assert torch.equal(tensor, out[name]) != pruned, name


def test_broken_hidden_states_name_the_layer(tmp_path, text):
    model = tiny.build("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.fill_(3e38)
    model.save_pretrained(tmp_path / "dense")
    tiny.tokenizer().save_pretrained(tmp_path / "dense")
    with pytest.raises(NumericalFailure, match="layer 1"):
        run(tmp_path / "dense", tmp_path / "out", text, method="wanda")


def test_linears_with_different_inputs_in_one_group_are_found_out(llama):
    skeleton = Skeleton(open_source(llama))
    skeleton.fill_others(head=False)
    layer = skeleton.read_layer(0)
    modules = {name: layer.get_submodule(name) for name in ("self_attn.q_proj", "self_attn.o_proj")}
    wrong = [engine.Stage("self_attn.q_proj", [engine.Group(modules, engine.Statistics(frozenset({"norms"})))])]
    hidden = []
    calls = engine.record(skeleton, [torch.ones(1, 8, dtype=torch.long)], hidden.append)[1, 8]
    streams = engine.Streams(layer, None, hidden, hidden, [calls[0]])
    with pytest.raises(CompressError, match="self_attn.o_proj does not share its input with self_attn.q_proj"):
        engine.run_layer(streams, wrong, lambda stage: None, lambda a, b: None, Clock(), True)


def test_tokens_are_aligned_between_routers():
    x, dense = torch.tensor([[1.0], [2], [3]]), torch.tensor([[10.0], [30], [40]])
    routed = engine.Routed(x, torch.tensor([1, 3, 5]))
    other = engine.Routed(dense, torch.tensor([1, 4, 5]))
    # Token 3 went elsewhere in the dense layer and stands for itself.
    assert engine.aligned(routed, other).flatten().tolist() == [10.0, 2.0, 40.0]
    nothing = engine.Routed(torch.empty(0, 1), torch.empty(0, dtype=torch.long))
    assert torch.equal(engine.aligned(routed, nothing), x)
