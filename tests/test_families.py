"""Every family: the engine's dense run is the model's own, and a pruned model is what it says it is."""

import pytest
import tiny
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import llmcompress
from llmcompress.calibration import engine
from llmcompress.checkpoint.skeleton import Skeleton
from llmcompress.checkpoint.source import open_source
from llmcompress.layerwise import linears_of

FAMILIES = list(tiny.CONFIGS)


def calibration(text):
    # Tokenised here: transformers takes some model types as a sign that the tokenizer is another than the stored one.
    ids = torch.tensor(tiny.tokenizer()(text.read_text())["input_ids"][: 24 * 48]).view(24, 48)
    return llmcompress.Calibration(str(text), 24, 48).drawn(ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_run_equals_transformers_layer_by_layer(family, tmp_path):
    folder = tiny.save(family, tmp_path)
    ids = torch.randint(3, tiny.VOCABULARY, (3, 40), generator=torch.Generator().manual_seed(1))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    seen = []
    skeleton = Skeleton(open_source(folder))
    for layer in model.get_submodule(skeleton.family.layers):
        layer.register_forward_hook(lambda module, args, output: seen.append(engine.first_tensor(output)))
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
        skeleton.fill_others(head=True)
        entering = []
        calls = engine.record(skeleton, [ids], entering.append)[3, 40]
        hidden = entering[0]
        for i in range(len(seen)):
            args, kwargs = calls[i]
            hidden = engine.first_tensor(skeleton.read_layer(i)(hidden, *args, **kwargs))
            assert (hidden - seen[i]).abs().max() <= 1e-5, f"layer {i}"
    assert logits.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_prunes_end_to_end(family, dtype, tmp_path, text):
    source = tiny.save(family, tmp_path / "dense", dtype)
    out = tmp_path / "pruned"
    result = llmcompress.prune(source, "fista", "2:4", out, calibration(text))
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
    stored_before, stored_after = read_all(source), read_all(out)
    assert stored_before.keys() == stored_after.keys()
    for name, tensor in stored_before.items():
        other = stored_after[name]
        assert other.dtype == tensor.dtype and other.shape == tensor.shape
        assert torch.equal(tensor, other) != (name in changed), name
        assert not (other.signbit() & (other == 0)).any() or name not in changed
    tied = before.get_input_embeddings().weight.data_ptr() == before.get_output_embeddings().weight.data_ptr()
    assert tied == (after.get_input_embeddings().weight.data_ptr() == after.get_output_embeddings().weight.data_ptr())
    ids = torch.tensor([[1, 5, 9]])
    made = after.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert made.shape == (1, 7)


def read_all(folder):
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def coverage(family):
    """Share of a decoder layer's parameters in matrices that methods see as linears."""
    skeleton = Skeleton(family)
    layer = skeleton.layers[0]
    linears = sum(linear.weight.numel() for linear in linears_of(skeleton, layer).values())
    return linears / sum(p.numel() for p in layer.parameters() if p.dim() > 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_matrix_of_a_layer_is_seen_but_routers(family, tmp_path):
    share = coverage(open_source(tiny.save(family, tmp_path)))
    # Routers choose experts; they are tiny and left alone.
    assert share == 1 if family not in ("mixtral", "qwen3_moe") else 0.95 < share < 1


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_fused_and_split_expert_files_give_the_same(family, tmp_path, text):
    split = tiny.save(family, tmp_path / "split")
    model = AutoModelForCausalLM.from_pretrained(split)
    fused = tmp_path / "fused"
    model.save_pretrained(fused, save_original_format=False)
    tiny.tokenizer().save_pretrained(fused)
    names = read_all(fused)
    assert any(name.endswith("experts.gate_up_proj") for name in names), sorted(names)[:5]
    outs = []
    for folder in (split, fused):
        out = tmp_path / f"{folder.name}-out"
        llmcompress.prune(folder, "wanda", "2:4", out, calibration(text))
        outs.append(AutoModelForCausalLM.from_pretrained(out).state_dict())
    for name, tensor in outs[0].items():
        assert torch.equal(tensor, outs[1][name]), name


def test_expert_that_saw_too_few_tokens_is_pruned_by_magnitude_and_reported(tmp_path, text):
    source = tiny.save("qwen3_moe", tmp_path / "dense", num_experts=64, num_experts_per_tok=1)
    result = llmcompress.prune(source, "sparsegpt", "2:4", tmp_path / "out", llmcompress.Calibration(str(text), 1, 32))
    assert any("too few for sparsegpt: pruned by magnitude" in warning for warning in result.warnings)
    assert all(warning.startswith("layer ") for warning in result.warnings)


def test_unknown_family_names_the_supported(tmp_path):
    folder = tiny.save("llama", tmp_path)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"gpt2"').replace("LlamaForCausalLM", "GPT2LMHeadModel"))
    with pytest.raises(llmcompress.errors.BadInput, match="gpt2.*supported: .*llama.*families/llama.py"):
        Skeleton(open_source(folder))
