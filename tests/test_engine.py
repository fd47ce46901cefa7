"""The engine: passes that pause, streams that start where they should, one forward per layer."""

import copy

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, Cache

import llmcompress
from llmcompress.calibration import engine
from llmcompress.calibration.stats import Statistics
from llmcompress.checkpoint.skeleton import Skeleton
from llmcompress.checkpoint.source import open_source
from llmcompress.clock import Clock
from llmcompress.errors import CompressError, NumericalFailure
from llmcompress.sparsity import parse


def calibration(text, samples=16, seq_len=32):
    return llmcompress.Calibration(str(text), samples, seq_len)


def run(source, out, text, method="fista", **given):
    llmcompress.prune(source, method, "2:4", out, calibration(text), **given)
    return tiny.stored(out)


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


GROUPS = {
    "self_attn.q_proj": ("q_proj", "k_proj", "v_proj"),
    "self_attn.o_proj": ("o_proj",),
    "mlp.gate_proj": ("gate_proj", "up_proj"),
    "mlp.down_proj": ("down_proj",),
}


def inputs(model, ids):
    """What each group of linears of each layer is given in a plain forward: (layer, group) -> (tokens, n)."""
    seen, handles = {}, []
    for i, layer in enumerate(model.model.layers):
        for group in GROUPS:

            def keep(module, args, key=(i, group)):
                seen[key] = args[0].flatten(0, -2)

            handles.append(layer.get_submodule(group).register_forward_pre_hook(keep))
    with torch.no_grad():
        model(ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return seen


def statistics_by_hand(correction, dense, pruned, ids):
    """(X, X*) of each group, from plain forwards of whole models that are put together anew for each."""
    from_dense = inputs(dense, ids)
    mixed = copy.deepcopy(dense)
    for i, layer in enumerate(mixed.model.layers):
        whole = inputs(mixed, ids)  # with the layers before i pruned
        if correction == "layer":
            # Each layer is entered by the dense model's states.
            mixed = copy.deepcopy(dense)
            layer = mixed.model.layers[i]
        for group, names in GROUPS.items():
            now = inputs(mixed, ids)[i, group]
            x = {"layer": from_dense, "model": from_dense, "sequential": whole, "off": {(i, group): now}}[correction]
            yield i, group, x[i, group], now
            block = group.partition(".")[0]
            for name in names:
                path = f"{block}.{name}"
                layer.get_submodule(path).load_state_dict(pruned.model.layers[i].get_submodule(path).state_dict())


@pytest.mark.parametrize("correction", ["layer", "sequential", "model", "off"])
def test_streams_are_those_of_plain_forwards(correction, tmp_path, text, llama, monkeypatch, small_batches):
    caught = []
    method = llmcompress.methods.find("fista")
    original = method.prune

    def spy(given, stats, pattern, options, clock):
        caught.append((stats.gram.clone(), stats.cross.clone()))
        return original(given, stats, pattern, options, clock)

    monkeypatch.setattr(method, "prune", spy)
    drawn = calibration(text)
    ids = drawn.tokens(open_source(llama).tokenizer(), None)
    llmcompress.prune(llama, "fista", "2:4", tmp_path / "out", drawn.drawn(ids), error_correction=correction)
    dense, pruned = (AutoModelForCausalLM.from_pretrained(folder) for folder in (llama, tmp_path / "out"))
    by_hand = list(statistics_by_hand(correction, dense, pruned, ids))
    assert len(caught) == len(by_hand) == 3 * 4
    differ = set()
    for (gram, cross), (i, group, x, star) in zip(caught, by_hand, strict=True):
        scale = (star.T @ star).abs().max()
        assert (gram - star.T @ star).abs().max() < 1e-5 * scale, (i, group)
        assert (cross - x.T @ star).abs().max() < 1e-5 * scale, (i, group)
        if (cross - gram).abs().max() > 1e-3 * scale:
            differ.add((i, group))
    first = "self_attn.q_proj"
    apart = {
        "layer": {(i, group) for i in range(3) for group in GROUPS if group != first},
        "sequential": {(i, group) for i in range(3) for group in GROUPS if group != first},
        "model": {(i, group) for i in range(3) for group in GROUPS if (i, group) != (0, first)},
        "off": set(),
    }
    assert differ == apart[correction]


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_methods_without_a_dense_stream_by_hand(method, tmp_path, text, llama):
    drawn = calibration(text)
    ids = drawn.tokens(open_source(llama).tokenizer(), None)
    llmcompress.prune(llama, method, "2:4", tmp_path / "out", drawn.drawn(ids))
    model = AutoModelForCausalLM.from_pretrained(llama)
    module = llmcompress.methods.find(method)
    for layer in model.model.layers:
        i = layer.self_attn.layer_idx
        for group, names in GROUPS.items():
            x = inputs(model, ids)[i, group]
            stats = Statistics(module.NEEDS)
            stats.add(x, x, same=True)
            linears = {name: layer.get_submodule(f"{group.partition('.')[0]}.{name}") for name in names}
            found = module.prune(
                {name: linear.weight.detach() for name, linear in linears.items()}, stats, parse("2:4"),
                module.Options(), Clock(),
            )  # fmt: skip
            for name, linear in linears.items():
                linear.weight.data = found[name]
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.allclose(tensor, written[name], atol=1e-4), name
        assert torch.equal(tensor == 0, written[name] == 0), name


def test_with_layer_correction_a_layer_alone_gets_the_same_bits(tmp_path, text, llama):
    everything = run(llama, tmp_path / "all", text, error_correction="layer")
    alone = run(llama, tmp_path / "one", text, error_correction="layer", targets=["layers.2.*"])
    source = tiny.stored(llama)
    for name, tensor in alone.items():
        assert torch.equal(tensor, (everything if ".layers.2." in name else source)[name]), name


def test_same_seed_same_bits_other_seed_others(tmp_path, text, llama):
    one = run(llama, tmp_path / "a", text)
    two = run(llama, tmp_path / "b", text)
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())
    llmcompress.prune(llama, "fista", "2:4", tmp_path / "c", llmcompress.Calibration(str(text), 16, 32, seed=1))
    other = tiny.stored(tmp_path / "c")
    assert any(not torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_targets_leave_the_rest_alone(tmp_path, text, llama):
    out = run(llama, tmp_path / "out", text, targets=["self_attn.*", "layers.0.mlp.up_proj"])
    for name, tensor in tiny.stored(llama).items():
        pruned = "self_attn" in name or name.endswith("layers.0.mlp.up_proj.weight")
        assert torch.equal(tensor, out[name]) != pruned, name


@pytest.mark.parametrize("i", [0, 1, 2])
@pytest.mark.parametrize(
    ("method", "name", "told"),
    [
        ("wanda", "mlp.down_proj", "the hidden states after layer {} hold NaN or Inf"),
        ("wanda", "self_attn.v_proj", "the inputs of layer {} self_attn.o_proj hold NaN or Inf"),
        ("wanda", "mlp.up_proj", "the inputs of layer {} mlp.down_proj hold NaN or Inf"),
        ("fista", "mlp.down_proj", "layer {} mlp.down_proj: fista gave NaN or Inf"),
    ],
)
def test_numbers_that_break_down_name_the_layer(method, name, told, i, tmp_path, text):
    model = tiny.build("llama")
    with torch.no_grad():
        model.model.layers[i].get_submodule(name).weight.fill_(3e38)
    model.save_pretrained(tmp_path / "dense")
    tiny.tokenizer().save_pretrained(tmp_path / "dense")
    with pytest.raises(NumericalFailure, match=told.format(i)):
        run(tmp_path / "dense", tmp_path / "out", text, method=method)
    assert not (tmp_path / "out").exists()


def test_each_layer_keeps_the_arguments_that_it_was_called_with(tmp_path):
    folder = tiny.save("gemma3_text", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    given = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda module, args, kwargs: given.append(kwargs), with_kwargs=True)
    ids = torch.randint(3, tiny.VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        model(ids, use_cache=False)
    skeleton = Skeleton(open_source(folder))
    skeleton.fill_others(head=False)
    calls = engine.record(skeleton, [ids], lambda hidden: None)[2, 40]
    kinds = model.config.layer_types
    assert len(calls) == len(given) == 7 and len(set(kinds)) == 2
    for (args, kwargs), expected in zip(calls, given, strict=True):
        assert args == ()
        for name in ("attention_mask", "position_embeddings", "position_ids"):
            assert same(kwargs[name], expected[name]), name
    sliding, full = kinds.index("sliding_attention"), kinds.index("full_attention")
    for name in ("attention_mask", "position_embeddings"):
        assert not same(calls[sliding][1][name], calls[full][1][name]), name


def same(one, two):
    if isinstance(one, tuple):
        return len(one) == len(two) and all(map(same, one, two))
    return torch.equal(one, two) if torch.is_tensor(one) and torch.is_tensor(two) else one is two


def test_nothing_stateful_is_recorded(llama):
    skeleton = Skeleton(open_source(llama))
    skeleton.fill_others(head=False)
    given = []

    def spy(hidden, args, kwargs):
        given.append(kwargs)
        return hidden

    ids = torch.ones(1, 8, dtype=torch.long)
    with engine.layers_replaced(skeleton, ids, spy):
        made = skeleton.model.base_model(input_ids=ids, use_cache=True)
    assert len(given) == 3 and any(isinstance(value, Cache) for value in made.values())
    assert not any(isinstance(value, Cache) for kwargs in given for value in kwargs.values())


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
