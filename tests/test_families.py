"""Every family: the engine's dense run is the model's own, and a pruned model is what it says it is."""

import re
import shutil

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

import llmcompress
from llmcompress.calibration import engine
from llmcompress.checkpoint.skeleton import Skeleton
from llmcompress.checkpoint.source import open_source
from llmcompress.errors import BadInput
from llmcompress.evaluate.stream import final_logits
from llmcompress.families import all_families
from llmcompress.layerwise import linears_of

FAMILIES = list(tiny.CONFIGS)
MOE = ["mixtral", "qwen3_moe"]
# What real checkpoints of a family differ in.
VARIANTS = [
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, "num_hidden_layers": 1}),
    ("mistral", {"sliding_window": None}),
    ("qwen2", {"tie_word_embeddings": False, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    ("opt", {"word_embed_proj_dim": 16}),
    ("opt", {"do_layer_norm_before": False}),
    ("opt", {"enable_bias": False, "layer_norm_elementwise_affine": False}),
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("phi3", {"sliding_window": 16}),
    ("gpt_neox", {"use_parallel_residual": False}),
    ("gpt_neox", {"attention_bias": False, "tie_word_embeddings": True}),
    ("qwen3_moe", {"mlp_only_layers": [1], "norm_topk_prob": True}),
    ("mixtral", {"sliding_window": 16, "num_experts_per_tok": 1}),
]


def variant_id(value):
    return value if isinstance(value, str) else "-".join(value)


def ids_of(text):
    return torch.tensor(tiny.tokenizer()(text.read_text())["input_ids"][: 24 * 48]).view(24, 48)


def calibration(text):
    # Tokenised here: transformers takes some model types as a sign that the tokenizer is another than the stored one.
    return llmcompress.Calibration(str(text), 24, 48).drawn(ids_of(text))


def test_every_supported_model_type_is_tested():
    assert {model_type for family in all_families() for model_type in family.model_types} == set(FAMILIES)


def assert_dense_run_is_that_of_transformers(folder, attention=None):
    # Three texts, longer than the sliding windows.
    ids = torch.randint(3, tiny.VOCABULARY, (3, 40), generator=torch.Generator().manual_seed(1))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    source = open_source(folder)
    source.config._attn_implementation = attention
    skeleton = Skeleton(source)
    count = len(skeleton.layers)
    with torch.no_grad():
        expected = model(ids, use_cache=False, output_hidden_states=True)
        skeleton.fill_others(head=True)
        entering = []
        calls = engine.record(skeleton, [ids], entering.append)[3, 40]
        (hidden,) = entering
        assert torch.equal(hidden, expected.hidden_states[0])
        for i in range(count):
            args, kwargs = calls[i]
            before = hidden
            hidden = engine.first_tensor(skeleton.read_layer(i)(hidden, *args, **kwargs))
            assert (hidden - before).abs().max() > 1e-2
            # After the last layer transformers shows the states behind the final norm.
            if i + 1 < count:
                assert (hidden - expected.hidden_states[i + 1]).abs().max() <= 1e-5, f"layer {i}"
        logits = final_logits(skeleton, hidden)
    assert (logits - expected.logits).abs().max() <= 1e-4
    assert logits.std() > 1e-2


@pytest.mark.parametrize("attention", [None, "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_dense_run_equals_transformers_layer_by_layer(family, attention, tmp_path):
    assert_dense_run_is_that_of_transformers(tiny.save(family, tmp_path), attention)


@pytest.mark.parametrize(("family", "over"), VARIANTS, ids=variant_id)
def test_dense_run_of_variants(family, over, tmp_path):
    assert_dense_run_is_that_of_transformers(tiny.save(family, tmp_path, **over))


def assert_prunes(source, out, text, method):
    dtype = open_source(source).config.dtype
    result = llmcompress.prune(source, method, "2:4", out, calibration(text))
    assert not result.warnings
    before, after = (AutoModelForCausalLM.from_pretrained(f, dtype="auto") for f in (source, out))
    assert after.dtype == dtype
    skeleton = Skeleton(open_source(out))
    changed = set()
    for i in range(len(skeleton.layers)):
        layer = skeleton.read_layer(i)
        linears = linears_of(skeleton, layer)
        assert linears
        for name, linear in linears.items():
            groups = (linear.weight != 0).unflatten(1, (-1, 4)).sum(-1)
            assert groups.max() <= 2, f"layer {i} {name}"
            assert (groups == 2).float().mean() > 0.98
            changed |= {piece.name for piece in skeleton.places[i][f"{name}.weight"]}
    stored_before, stored_after = tiny.stored(source), tiny.stored(out)
    assert stored_before.keys() == stored_after.keys()
    for name, tensor in stored_before.items():
        other = stored_after[name]
        assert other.dtype == tensor.dtype == dtype and other.shape == tensor.shape
        assert torch.equal(tensor, other) != (name in changed), name
        assert not (other.signbit() & (other == 0)).any() or name not in changed
    for model in (before, after):
        table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        assert (table.data_ptr() == head.data_ptr()) == bool(before.config.tie_word_embeddings)
    made = after.generate(torch.tensor([[1, 5, 9]]), max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert made.shape == (1, 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_prunes_end_to_end(family, dtype, tmp_path, text):
    assert_prunes(tiny.save(family, tmp_path / "dense", dtype), tmp_path / "pruned", text, "fista")


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_neox", "qwen3_moe"])
def test_prunes_end_to_end_with_wanda(family, tmp_path, text):
    assert_prunes(tiny.save(family, tmp_path / "dense", torch.float16), tmp_path / "pruned", text, "wanda")


@pytest.mark.parametrize(("family", "over"), VARIANTS, ids=variant_id)
def test_variants_prune_end_to_end(family, over, tmp_path, text):
    assert_prunes(tiny.save(family, tmp_path / "dense", **over), tmp_path / "pruned", text, "fista")


def coverage(source):
    """Share of a decoder layer's parameters in matrices that methods see as linears."""
    skeleton = Skeleton(source)
    layer = skeleton.layers[0]
    linears = sum(linear.weight.numel() for linear in linears_of(skeleton, layer).values())
    return linears / sum(p.numel() for p in layer.parameters() if p.dim() > 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_matrix_of_a_layer_is_seen_but_routers(family, tmp_path):
    share = coverage(open_source(tiny.save(family, tmp_path)))
    # Routers choose experts; they are tiny and left alone.
    assert share == 1 if family not in MOE else 0.95 < share < 1


@pytest.mark.parametrize("method", ["wanda", "fista"])
@pytest.mark.parametrize("family", MOE)
def test_fused_and_split_expert_files_give_the_same(family, method, tmp_path, text):
    split = tiny.save(family, tmp_path / "split")
    model = AutoModelForCausalLM.from_pretrained(split)
    fused = tmp_path / "fused"
    model.save_pretrained(fused, save_original_format=False)
    tiny.tokenizer().save_pretrained(fused)
    outs = []
    for folder in (split, fused):
        out = tmp_path / f"{folder.name}-out"
        llmcompress.prune(folder, method, "2:4", out, calibration(text))
        assert tiny.stored(out).keys() == tiny.stored(folder).keys()
        outs.append(AutoModelForCausalLM.from_pretrained(out).state_dict())
    assert tiny.stored(split).keys() != tiny.stored(fused).keys()
    assert tiny.stored(fused)["model.layers.0.mlp.experts.gate_up_proj"].dim() == 3
    for name, tensor in outs[0].items():
        assert torch.equal(tensor, outs[1][name]), name


def routed(model, ids, i, top_k):
    """Input of the mixture in layer i, (tokens, n), and for each expert which of the tokens its router sends there."""
    seen = []
    mixture = model.model.layers[i].mlp
    handle = mixture.register_forward_pre_hook(lambda module, args: seen.append(args[0].flatten(0, -2)))
    with torch.no_grad():
        model(ids, use_cache=False)
        handle.remove()
        chosen = (seen[0] @ mixture.gate.weight.T).topk(top_k).indices
    return seen[0], [(chosen == e).any(1) for e in range(len(mixture.gate.weight))]


def two_of_four(weight, score):
    keep = torch.zeros_like(weight, dtype=torch.bool).unflatten(1, (-1, 4))
    keep.scatter_(2, score.unflatten(1, (-1, 4)).topk(2).indices, True)
    return weight * keep.flatten(1)


def wanda(weight, x):
    return two_of_four(weight, weight.abs() * x.norm(dim=0))


NAMES = {
    "mixtral": "model.layers.1.block_sparse_moe.experts.{}.{}.weight",
    "qwen3_moe": "model.layers.1.mlp.experts.{}.{}.weight",
}
PARTS = {"mixtral": ("w1", "w3", "w2"), "qwen3_moe": ("gate_proj", "up_proj", "down_proj")}


@pytest.mark.parametrize("kind", ["gate_up", "down"])
@pytest.mark.parametrize("family", MOE)
def test_each_expert_is_pruned_with_the_tokens_routed_to_it(family, kind, tmp_path, text):
    source = tiny.save(family, tmp_path / "dense")
    target = f"layers.1.mlp.experts.{kind}.*"
    llmcompress.prune(source, "wanda", "2:4", tmp_path / "out", calibration(text), targets=[target])
    before, after = tiny.stored(source), tiny.stored(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(source)
    x, chosen = routed(model, ids_of(text), 1, 2)
    expected = {}
    for e, tokens in enumerate(chosen):
        assert 50 < tokens.sum() < len(x) - 50
        gate, up, down = (NAMES[family].format(e, part) for part in PARTS[family])
        if kind == "gate_up":
            expected |= {name: wanda(before[name], x[tokens]) for name in (gate, up)}
        else:
            inner = model.model.layers[1].mlp.experts.act_fn(x[tokens] @ before[gate].T) * (x[tokens] @ before[up].T)
            expected[down] = wanda(before[down], inner)
            # The choice of tokens matters.
            everything = model.model.layers[1].mlp.experts.act_fn(x @ before[gate].T) * (x @ before[up].T)
            assert not torch.equal(expected[down], wanda(before[down], everything))
    for name, tensor in after.items():
        assert torch.equal(tensor, expected.get(name, before[name])), name


def test_expert_that_saw_too_few_tokens_is_pruned_by_magnitude_and_reported(tmp_path, text):
    source = tiny.save("qwen3_moe", tmp_path / "dense", num_experts=64, num_experts_per_tok=1)
    out = tmp_path / "out"
    result = llmcompress.prune(source, "sparsegpt", "2:4", out, llmcompress.Calibration(str(text), 1, 32))
    pattern = r"layer (\d): mlp\.experts\.gate_up\.(\d+) saw [01] tokens, too few for sparsegpt: pruned by magnitude"
    starved = {match.groups() for warning in result.warnings if (match := re.fullmatch(pattern, warning))}
    before, after = tiny.stored(source), tiny.stored(out)
    by_magnitude = set()
    for i in range(3):
        for e in range(64):
            name = f"model.layers.{i}.mlp.experts.{e}.up_proj.weight"
            if torch.equal(after[name], two_of_four(before[name], before[name].abs())):
                by_magnitude.add((str(i), str(e)))
    # The experts are 32 wide: two tokens are enough.
    assert {warning.split(" saw ")[1][0] for warning in result.warnings} == {"0", "1"}
    assert 20 < len(starved) < 3 * 64
    assert by_magnitude == starved


def test_unknown_family_names_the_supported(tmp_path):
    folder = tiny.save("llama", tmp_path)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"gpt2"').replace("LlamaForCausalLM", "GPT2LMHeadModel"))
    with pytest.raises(BadInput, match="gpt2.*supported: .*llama.*families/llama.py"):
        Skeleton(open_source(folder))


def test_buffers_in_old_gpt_neox_files_are_copied_and_not_judged(tmp_path, text):
    folder = tiny.save("gpt_neox", tmp_path / "dense", torch.float16)
    buffers = {}
    for i in range(3):
        prefix = f"gpt_neox.layers.{i}.attention."
        buffers |= {
            f"{prefix}bias": torch.ones(1, 1, 64, 64, dtype=torch.bool).tril(),
            f"{prefix}masked_bias": torch.tensor(-1e9).half(),
            f"{prefix}rotary_emb.inv_freq": torch.ones(2, dtype=torch.float16),
        }
    assert buffers["gpt_neox.layers.0.attention.masked_bias"] == -torch.inf
    tiny.restore(folder, {**tiny.stored(folder), **buffers})
    assert_dense_run_is_that_of_transformers(folder)
    llmcompress.prune(folder, "fista", "2:4", tmp_path / "out", calibration(text))
    after = tiny.stored(tmp_path / "out")
    assert all(
        torch.equal(after[name], tensor) and after[name].dtype == tensor.dtype for name, tensor in buffers.items()
    )
    assert llmcompress.load(tmp_path / "out").dtype == torch.float16


TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("kept", ["table", "head", "both", "both and different"])
def test_tied_embeddings_stored_under_any_name(kept, tmp_path, text):
    folder = tiny.save("qwen2", tmp_path / "dense")
    tensors = tiny.stored(folder)
    table = tensors.pop(TABLE)
    if kept != "head":
        tensors[TABLE] = table
    if kept != "table":
        # Where they differ transformers leaves them untied.
        tensors[HEAD] = table * (2 if "different" in kept else 1)
    tiny.restore(folder, tensors)
    assert_dense_run_is_that_of_transformers(folder)
    llmcompress.prune(folder, "wanda", "2:4", tmp_path / "out", calibration(text))
    after = tiny.stored(tmp_path / "out")
    assert after.keys() == tensors.keys()
    assert all(torch.equal(after[name], tensors[name]) for name in after.keys() & {TABLE, HEAD})
    model = llmcompress.load(tmp_path / "out")
    tied = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert tied == (kept != "both and different")


def test_tied_embeddings_stored_nowhere_are_named(tmp_path, text):
    folder = tiny.save("qwen2", tmp_path / "dense")
    tensors = tiny.stored(folder)
    del tensors[TABLE]
    tiny.restore(folder, tensors)
    with pytest.raises(BadInput, match=f"lacks the tensor {TABLE}"):
        llmcompress.prune(folder, "wanda", "2:4", tmp_path / "out", calibration(text))
    assert not (tmp_path / "out").exists()


def test_checkpoint_without_the_base_models_prefix(tmp_path, text):
    folder = tiny.save("llama", tmp_path / "dense")
    bare = shutil.copytree(folder, tmp_path / "bare")
    tiny.restore(bare, {name.removeprefix("model."): tensor for name, tensor in tiny.stored(folder).items()})
    for source in (folder, bare):
        llmcompress.prune(source, "wanda", "2:4", tmp_path / f"{source.name}-out", calibration(text))
    prefixed, plain = tiny.stored(tmp_path / "dense-out"), tiny.stored(tmp_path / "bare-out")
    assert {name.removeprefix("model."): t.tolist() for name, t in prefixed.items()} == {
        name: t.tolist() for name, t in plain.items()
    }
