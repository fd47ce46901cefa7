"""Checkpoints: what is read, what is written, and that what was written is looked at again."""

import hashlib
import json
import math
import shutil
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import llmcompress
from llmcompress import layerwise
from llmcompress.checkpoint import output, skeleton
from llmcompress.checkpoint.source import open_source
from llmcompress.errors import BadInput, CantWrite, CorruptOutput, NumericalFailure

UP = "model.layers.1.mlp.up_proj.weight"


def resave(folder, change):
    """Rewrites a checkpoint of one file with changed tensors."""
    tensors = tiny.stored(folder)
    change(tensors)
    return tiny.restore(folder, tensors)


def sharded(family, folder, size="20KB", **over):
    """The model of `tiny.save` in many files, its layers spread over them."""
    tiny.build(family, **over).save_pretrained(folder, max_shard_size=size)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def contents(folder):
    """Every file below a folder with its bytes, and every folder."""
    return {str(path.relative_to(folder)): path.is_file() and path.read_bytes() for path in folder.rglob("*")}


def equal(one, two):
    return one.keys() == two.keys() and all(torch.equal(tensor, two[name]) for name, tensor in one.items())


# What is read.


def test_sharded_and_single_files_give_the_same(tmp_path, text, llama):
    many = sharded("llama", tmp_path / "many")
    index = json.loads((many / "model.safetensors.index.json").read_text())["weight_map"]
    for i in range(3):
        assert len({file for name, file in index.items() if f".layers.{i}." in name}) > 1
    before = contents(many)
    calibration = llmcompress.Calibration(str(text), 8, 32)
    for name, source in (("a", llama), ("b", many)):
        llmcompress.prune(source, "sparsegpt", "2:4", tmp_path / name, calibration)
    assert equal(tiny.stored(tmp_path / "a"), tiny.stored(tmp_path / "b"))
    assert contents(many) == before


@pytest.mark.parametrize("neighbour", ["consolidated.safetensors", "adapter_model.safetensors", "a.safetensors"])
def test_other_tensors_beside_the_model_are_no_part_of_it(neighbour, tmp_path, llama):
    folder = shutil.copytree(llama, tmp_path / "model")
    save_file({"layers.0.attention.wq.weight": torch.ones(4, 4), UP: torch.zeros(48, 32)}, folder / neighbour)
    llmcompress.prune(folder, "magnitude", "2:4", tmp_path / "out")
    llmcompress.prune(llama, "magnitude", "2:4", tmp_path / "alone")
    assert equal(tiny.stored(tmp_path / "out"), tiny.stored(tmp_path / "alone"))
    assert llmcompress.load(tmp_path / "out")


def test_single_file_comes_before_an_index_as_in_transformers(tmp_path, llama):
    folder = sharded("llama", tmp_path / "model", seed=7)
    shutil.copyfile(llama / "model.safetensors", folder / "model.safetensors")
    opened = AutoModelForCausalLM.from_pretrained(folder).state_dict()[UP]
    assert torch.equal(opened, tiny.stored(llama)[UP])
    source = open_source(folder)
    assert torch.equal(source.read([UP])[UP], opened) and len(set(source.files.values())) == 1


def test_float16_overflows_in_no_layer(tmp_path, text):
    model = tiny.build("llama", torch.float16)
    with torch.no_grad():
        # Hidden states of some 10^5, as the last layers of real models have them.
        model.model.layers[1].mlp.up_proj.weight.mul_(100)
        model.model.layers[1].mlp.down_proj.weight.mul_(3e3)
    model.save_pretrained(tmp_path / "dense")
    tiny.tokenizer().save_pretrained(tmp_path / "dense")
    wide = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    with torch.no_grad():
        states = wide(torch.arange(4, 36)[None], output_hidden_states=True).hidden_states
    assert states[2].abs().max() > torch.finfo(torch.float16).max
    result = llmcompress.prune(
        tmp_path / "dense", "fista", "2:4", tmp_path / "out", llmcompress.Calibration(str(text), 8, 32)
    )
    after = tiny.stored(tmp_path / "out")
    assert all(tensor.dtype == torch.float16 and tensor.isfinite().all() for tensor in after.values())
    assert 0.49 < result.totals["pruned linears"]["sparsity"] < 0.52
    assert llmcompress.load(tmp_path / "out").dtype == torch.float16


def test_weights_that_float16_cannot_hold_name_the_layer(tmp_path, text):
    model = tiny.build("llama", torch.float16)
    with torch.no_grad():
        # What is left of such weights has to carry what is gone.
        model.model.layers[1].mlp.down_proj.weight.mul_(1e6).clamp_(-6e4, 6e4)
    model.save_pretrained(tmp_path / "dense")
    tiny.tokenizer().save_pretrained(tmp_path / "dense")
    told = r"layer 1 mlp\.down_proj: fista gave NaN or Inf in torch\.float16"
    with pytest.raises(NumericalFailure, match=told):
        llmcompress.prune(
            tmp_path / "dense", "fista", "2:4", tmp_path / "out", llmcompress.Calibration(str(text), 8, 32)
        )


@pytest.mark.parametrize(("dtype", "told"), [(torch.bfloat16, "mixes dtypes.* in BF16"), (torch.int8, "mixes.* in I8")])
def test_mixed_dtypes_are_refused(dtype, told, tmp_path):
    source = tiny.save("llama", tmp_path / "dense")
    resave(source, lambda tensors: tensors.update({UP: tensors[UP].to(dtype)}))
    with pytest.raises(BadInput, match=told):
        llmcompress.prune(source, "magnitude", "2:4", tmp_path / "out")


def test_float64_is_refused(tmp_path):
    with pytest.raises(BadInput, match="stores F64; use float32, bfloat16 or float16"):
        llmcompress.prune(tiny.save("llama", tmp_path / "dense", torch.float64), "magnitude", "2:4", tmp_path / "out")


def assert_refused(source, told, tmp_path):
    before = contents(source)
    with pytest.raises(BadInput, match=told):
        llmcompress.prune(source, "magnitude", "2:4", tmp_path / "new" / "out")
    assert not (tmp_path / "new").exists() and contents(source) == before


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "model.layers.2.self_attn.o_proj.weight"),
        ("llama", "lm_head.weight"),
        ("llama", "model.norm.weight"),
        ("opt", "model.decoder.layers.0.fc1.bias"),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.3.w2.weight"),
        ("gpt_neox", "gpt_neox.layers.1.attention.query_key_value.bias"),
    ],
)
def test_weight_that_is_not_finite_is_named(family, name, bad, tmp_path):
    source = tiny.save(family, tmp_path / "dense", torch.bfloat16)
    resave(source, lambda tensors: tensors[name].view(-1)[-1:].fill_(bad))
    assert_refused(source, f"tensor {name} of model.safetensors holds NaN or Inf", tmp_path)


@pytest.mark.parametrize(
    ("family", "name", "told"),
    [
        ("llama", UP, UP),
        ("llama", "model.layers.0.input_layernorm.weight", "model.layers.0.input_layernorm.weight"),
        ("llama", "model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("llama", "lm_head.weight", "lm_head.weight"),
        ("llama", "model.norm.weight", "model.norm.weight"),
        ("opt", "model.decoder.layers.2.self_attn.k_proj.bias", "model.decoder.layers.2.self_attn.k_proj.bias"),
        ("opt", "model.decoder.embed_positions.weight", "model.decoder.embed_positions.weight"),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.3.w2.weight", "model.layers.1.mlp.experts.down.3.weight"),
        ("qwen3_moe", "model.layers.0.mlp.gate.weight", "model.layers.0.mlp.gate.weight"),
    ],
)
def test_missing_tensor_is_named(family, name, told, tmp_path):
    source = tiny.save(family, tmp_path / "dense")
    resave(source, lambda tensors: tensors.pop(name))
    assert_refused(source, f"lacks the tensor {told}; fetch it again", tmp_path)


def test_tensor_that_only_the_index_knows_is_named(tmp_path):
    source = sharded("llama", tmp_path / "many")
    index = source / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    path = source / listed["weight_map"][UP]
    save_file({name: tensor for name, tensor in load_file(path).items() if name != UP}, path)
    assert_refused(source, f"tensor {UP} is listed in its index and in no shard", tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 8, 200, -1])
def test_truncated_shard_is_named(keep, tmp_path):
    source = sharded("llama", tmp_path / "many")
    path = sorted(source.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:keep])
    assert_refused(source, f"{path.name} is not a whole safetensors file.*fetch it again", tmp_path)


def test_pickled_weights_can_be_converted_as_the_refusal_says(tmp_path, llama, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = shutil.copytree(llama, tmp_path / "DIR")
    torch.save(tiny.stored(llama), source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    advice = r"AutoModelForCausalLM.from_pretrained\(DIR\).save_pretrained\(NEW_DIR\)"
    assert_refused(source, f"holds only pytorch_model.bin.*can run code.*{advice}, and give NEW_DIR", tmp_path)
    eval(advice.replace("\\", ""), {**globals(), "DIR": "DIR", "NEW_DIR": "NEW_DIR"})
    llmcompress.prune("NEW_DIR", "magnitude", "2:4", tmp_path / "out")
    llmcompress.prune(llama, "magnitude", "2:4", tmp_path / "same")
    assert equal(tiny.stored(tmp_path / "out"), tiny.stored(tmp_path / "same"))


def test_skeleton_holds_no_weights(llama):
    empty = skeleton.Skeleton(open_source(llama))
    assert all(p.is_meta for p in empty.model.parameters())
    assert empty.read_layer(1).mlp.up_proj.weight.device.type == "cpu"
    assert all(p.is_meta for p in empty.model.parameters())


# What is written.


def test_index_and_side_files(tmp_path):
    source = tiny.save("qwen2", tmp_path / "dense")
    for name, content in (("chat_template.jinja", "{{ x }}"), (".hidden", "a"), ("LICENSE", "free"), ("old.bin", "b")):
        (source / name).write_text(content)
    out = tmp_path / "out"
    llmcompress.prune(source, "magnitude", "2:4", out)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    held = {name: path.name for path in out.glob("*.safetensors") for name in load_file(path)}
    assert index["weight_map"] == held and held.keys() == tiny.stored(source).keys()
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tiny.stored(out).values())
    copied = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "LICENSE"}
    copied.add("chat_template.jinja")
    for name in copied:
        assert (out / name).read_bytes() == (source / name).read_bytes()
    made = {"llmcompress.json", "model.safetensors.index.json", *held.values()}
    reports = {path.name for path in out.iterdir() if path.name.startswith("report")}
    assert {path.name for path in out.iterdir()} == copied | made | reports


def test_manifest_says_what_was_done(tmp_path, text, llama):
    out = tmp_path / "out"
    drawn = llmcompress.Calibration(str(text), 8, 32, seed=4)
    ids = drawn.tokens(open_source(llama).tokenizer(), None)
    result = llmcompress.prune(llama, "fista", "1:4", out, drawn, targets=["mlp.*"], rounds=2)
    manifest = json.loads((out / "llmcompress.json").read_text())
    recipe = manifest["recipe"]
    assert recipe["method"] == "fista" and recipe["sparsity"] == "1:4" and recipe["targets"] == ["mlp.*"]
    assert recipe["options"]["rounds"] == 2 and recipe["error_correction"] == "sequential"
    used = recipe["calibration"]
    assert (used["source"], used["samples"], used["seq_len"], used["seed"]) == (str(text), 8, 32, 4)
    assert used["tokens_sha256"] == hashlib.sha256(ids.numpy().tobytes()).hexdigest()
    of_file = hashlib.sha256((llama / "model.safetensors").read_bytes()).digest()
    assert manifest["source_sha256"] == hashlib.sha256(of_file).hexdigest()
    assert manifest["versions"]["torch"] == torch.__version__
    assert manifest["versions"]["llmcompress"] == llmcompress.__version__
    assert manifest["model"] == str(llama) and manifest["format"] == 1
    mlp = ["mlp.down_proj", "mlp.gate_proj", "mlp.up_proj"]
    assert manifest["pruned"] == [mlp] * 3
    assert [layer["layer"] for layer in manifest["layers"]] == [0, 1, 2]
    assert manifest["layers"] == result.layers and manifest["totals"] == result.totals
    assert manifest["warnings"] == [] and manifest["perplexity"] is None


def test_numbers_in_the_manifest_are_those_of_the_files(tmp_path, text, llama):
    out = tmp_path / "out"
    drawn = llmcompress.Calibration(str(text), 8, 32)
    ids = drawn.tokens(open_source(llama).tokenizer(), None)
    llmcompress.prune(llama, "wanda", "2:4", out, drawn.drawn(ids), targets=["mlp.*"], error_correction="off")
    manifest = json.loads((out / "llmcompress.json").read_text())
    before, after = tiny.stored(llama), tiny.stored(out)
    pruned = {name for name in after if ".mlp." in name}
    outside = {name for name in after if ".layers." not in name}
    classes = {
        "pruned linears": pruned,
        "other tensors in decoder layers": after.keys() - pruned - outside,
        "embeddings, head, norms": outside,
    }
    for kind, names in classes.items():
        total, zeros = sum(after[n].numel() for n in names), sum(int((after[n] == 0).sum()) for n in names)
        assert manifest["totals"][kind] == {"parameters": total, "zeros": zeros, "sparsity": zeros / total}
    assert manifest["totals"]["pruned linears"]["sparsity"] == 0.5
    # The errors are those of plain forwards on the same tokens.
    dense, sparse = (AutoModelForCausalLM.from_pretrained(folder) for folder in (llama, out))
    seen = []
    dense.model.layers[0].mlp.gate_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    ends = [[], []]
    for model, end in zip((dense, sparse), ends, strict=True):
        for layer in model.model.layers:
            layer.register_forward_hook(lambda module, args, hidden, end=end: end.append(hidden))
        with torch.no_grad():
            model(ids[:1, :64], use_cache=False)
    assert [facts["sparsity"] for facts in manifest["layers"]] == [0.5] * 3
    for facts, one, two in zip(manifest["layers"], *ends, strict=True):
        assert facts["error"] == pytest.approx(float((two - one).norm() / one.norm()), rel=1e-4)
    with torch.no_grad():
        dense(ids, use_cache=False)
    x = seen[-1].flatten(0, 1)
    name = "model.layers.0.mlp.gate_proj.weight"
    error = (x @ (after[name] - before[name]).T).norm() / (x @ before[name].T).norm()
    assert manifest["layers"][0]["linears"]["mlp.gate_proj"] == {
        "sparsity": 0.5,
        "error": pytest.approx(float(error), rel=1e-4),
    }


def test_pruned_model_can_be_pruned_again(tmp_path, llama):
    llmcompress.prune(llama, "magnitude", "2:4", tmp_path / "once")
    result = llmcompress.prune(tmp_path / "once", "magnitude", "1:4", tmp_path / "twice")
    assert result.totals["pruned linears"]["sparsity"] == 0.75
    history = json.loads((tmp_path / "twice" / "llmcompress.json").read_text())
    assert history["recipe"]["sparsity"] == "1:4" and history["model"] == str(tmp_path / "once")


# That it is looked at again.


def changed(name, change):
    def on_its_way(tensors):
        return {**tensors, name: change(tensors[name].clone())} if name in tensors else tensors

    return on_its_way


def first(where, value):
    """Sets the first entry at which `where` holds."""

    def change(weight):
        weight[tuple(where(weight).nonzero()[0])] = value
        return weight

    return change


NORM, TABLE = "model.layers.1.input_layernorm.weight", "model.embed_tokens.weight"
DAMAGE = {
    "pattern": (changed(UP, first(lambda w: w == 0, 0.01)), "layer 1 mlp.up_proj was written without its 2:4 pattern"),
    "nan": (changed(UP, first(lambda w: w != 0, math.nan)), "layer 1 mlp.up_proj was written with NaN or Inf"),
    "inf": (changed(UP, first(lambda w: w != 0, -math.inf)), "layer 1 mlp.up_proj was written with NaN or Inf"),
    "negative zero": (changed(UP, first(lambda w: w == 0, -0.0)), "layer 1 mlp.up_proj was written with negative zero"),
    "value": (changed(UP, first(lambda w: w != 0, 50.0)), "logits differ from those in memory"),
    "all zero": (changed(UP, torch.zeros_like), "logits differ from those in memory"),
    "norm": (changed(NORM, lambda w: w + 1e-3), f"tensor {NORM} was to stay as it is and has changed"),
    "one bit": (changed(TABLE, first(lambda w: w == w.max(), -0.0)), f"tensor {TABLE} was to stay as it is"),
    "nan outside": (changed(TABLE, first(lambda w: w == w.max(), math.nan)), f"tensor {TABLE} was to stay as it is"),
    "dtype": (changed(UP, torch.Tensor.bfloat16), f"can't be reopened.*mixes dtypes.*{UP} in BF16"),
    "dtype of norm": (changed(NORM, torch.Tensor.half), f"tensor {NORM} changed from torch.float32.*to torch.float16"),
    "shape": (changed(UP, lambda w: w[:-1]), f"tensor {UP} changed from .*48, 32.* to .*47, 32"),
    "shape of table": (changed(TABLE, lambda w: w[:-1]), f"can't be reopened: tensor {TABLE} has shape"),
    "lost": (lambda tensors: {k: v for k, v in tensors.items() if k != UP}, f"can't be reopened.*tensor {UP}"),
    "extra": (
        lambda tensors: tensors | ({"model.layers.1.more": torch.ones(1)} if UP in tensors else {}),
        "tensor model.layers.1.more is missing or was not in the source",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_on_the_way_to_the_disk_is_found(kind, tmp_path, llama, monkeypatch):
    real, (change, told) = output.save_file, DAMAGE[kind]
    llmcompress.prune(llama, "magnitude", "2:4", tmp_path / "out")
    before = contents(tmp_path)
    monkeypatch.setattr(
        output, "save_file", lambda tensors, path, metadata: real(change(tensors), path, metadata=metadata)
    )
    with pytest.raises(CorruptOutput, match=told):
        llmcompress.prune(llama, "magnitude", "2:4", tmp_path / "out", overwrite=True)
    # Nothing of it is left, and what stood there stands.
    assert contents(tmp_path) == before
    with pytest.raises(CorruptOutput, match=told):
        llmcompress.prune(llama, "magnitude", "2:4", tmp_path / "deep" / "er" / "out")
    assert contents(tmp_path) == before


def test_shard_cut_off_after_it_was_written_is_found(tmp_path, llama, monkeypatch):
    real = output.write_shard

    def cut(path, tensors):
        real(path, tensors)
        if "00002-of" in path.name:
            path.write_bytes(path.read_bytes()[:-4])

    monkeypatch.setattr(output, "write_shard", cut)
    with pytest.raises(CorruptOutput, match="can't be reopened.*model-00002-of-00004.safetensors is not a whole"):
        llmcompress.prune(llama, "magnitude", "2:4", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_fused_experts_are_looked_at_one_by_one(tmp_path, monkeypatch):
    source = tmp_path / "dense"
    tiny.build("mixtral").save_pretrained(source, save_original_format=False)
    tiny.tokenizer().save_pretrained(source)
    name = "model.layers.1.mlp.experts.down_proj"
    real, change = output.save_file, changed(name, first(lambda w: w == 0, 0.01))
    monkeypatch.setattr(
        output, "save_file", lambda tensors, path, metadata: real(change(tensors), path, metadata=metadata)
    )
    with pytest.raises(CorruptOutput, match="layer 1 mlp.experts.down.0 was written without its 2:4 pattern"):
        llmcompress.prune(source, "magnitude", "2:4", tmp_path / "out")


# All or nothing.


@pytest.mark.parametrize("place", ["check", "start", "compress", "first shard"])
def test_error_before_the_first_layer_is_finished_leaves_nothing(place, tmp_path, llama, text, monkeypatch):
    def event(kind, data):
        if kind == place:
            raise ZeroDivisionError

    if place == "compress":
        monkeypatch.setattr(layerwise.Layerwise, "compress", lambda *args, **given: 1 / 0)
    if place == "first shard":
        monkeypatch.setattr(output, "write_shard", lambda *args: 1 / 0)
    calibration = llmcompress.Calibration(str(text), 8, 32)
    with pytest.raises(ZeroDivisionError):
        llmcompress.prune(llama, "wanda", "2:4", tmp_path / "deep" / "er" / "out", calibration, on_event=event)
    assert list(tmp_path.iterdir()) == []


def test_target_is_there_only_when_all_is_done(tmp_path, llama, text, monkeypatch):
    out, seen = tmp_path / "out", []
    real = llmcompress.pipeline.write_report

    def last(folder, manifest):
        real(folder, manifest)
        seen.append(out.exists())

    monkeypatch.setattr("llmcompress.pipeline.write_report", last)
    llmcompress.prune(
        llama, "wanda", "2:4", out, llmcompress.Calibration(str(text), 8, 32),
        on_event=lambda kind, data: kind != "done" and seen.append(out.exists()),
    )  # fmt: skip
    assert seen == [False] * len(seen) and len(seen) > 5
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and not (out / ".run").exists()


def test_overwrite_replaces_the_folder_whole(tmp_path, llama):
    llmcompress.prune(llama, "magnitude", "2:4", tmp_path / "out")
    (tmp_path / "out" / "left-over.txt").write_text("old")
    llmcompress.prune(llama, "magnitude", "1:4", tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out" / "left-over.txt").exists()
    assert json.loads((tmp_path / "out" / "llmcompress.json").read_text())["recipe"]["sparsity"] == "1:4"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_failed_last_rename_puts_the_old_checkpoint_back(tmp_path, llama, monkeypatch):
    llmcompress.prune(llama, "magnitude", "2:4", tmp_path / "out")
    before, real = contents(tmp_path / "out"), Path.rename

    def rename(self, target):
        if self.name == ".out.partial":
            raise OSError(5, "Input/output error")
        return real(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        with pytest.raises(CantWrite, match="out can't be written: Input/output error"):
            llmcompress.prune(llama, "magnitude", "1:4", tmp_path / "out", overwrite=True)
    assert contents(tmp_path / "out") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.partial", "out"]
    # The work is not lost: it only has to be put in place.
    layers = []
    llmcompress.prune(
        llama, "magnitude", "1:4", tmp_path / "out", resume=True, overwrite=True,
        on_event=lambda kind, data: kind == "layer" and layers.append(data),
    )  # fmt: skip
    assert layers == [] and [path.name for path in tmp_path.iterdir()] == ["out"]
    assert json.loads((tmp_path / "out" / "llmcompress.json").read_text())["recipe"]["sparsity"] == "1:4"


def test_link_at_the_target_is_refused_and_kept(tmp_path, llama):
    llmcompress.prune(llama, "magnitude", "2:4", tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    before = contents(tmp_path)
    with pytest.raises(BadInput, match=f"link is a link to {tmp_path / 'real'}; give that folder itself"):
        llmcompress.prune(llama, "magnitude", "1:4", tmp_path / "link", overwrite=True)
    assert contents(tmp_path) == before and (tmp_path / "link").is_symlink()


# Opening.


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t.pop(UP), f"has missing keys: {UP}"),
        (lambda t: t.pop("model.norm.weight"), "has missing keys: model.norm.weight"),
        (lambda t: t.pop("lm_head.weight"), "has missing keys: lm_head.weight"),
        (
            lambda t: t.update({"model.layers.3.mlp.up_proj.weight": t[UP] * 2}),
            "unexpected keys: model.layers.3.mlp.up_proj",
        ),
        (lambda t: t.update({UP: torch.ones(3, 3)}), "mlp.up_proj.weight|mismatched"),
    ],
)
def test_load_refuses_what_would_open_with_random_weights(change, told, tmp_path, llama):
    folder = shutil.copytree(llama, tmp_path / "model")
    assert llmcompress.load(folder).dtype == torch.float32
    resave(folder, change)
    with pytest.raises(BadInput, match=told):
        llmcompress.load(folder)


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "mixtral", "opt"])
def test_load_of_a_pruned_model_is_the_plain_one(family, tmp_path, text):
    source = tiny.save(family, tmp_path / "dense", torch.bfloat16)
    llmcompress.prune(source, "magnitude", "2:4", tmp_path / "out")
    model = llmcompress.load(tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert not model.training and model.dtype == torch.bfloat16
    assert equal(model.state_dict(), plain.state_dict())
