"""Checkpoints: what is read, what is written, and that what was written is looked at again."""

import json

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import llmcompress
from llmcompress import layerwise
from llmcompress.checkpoint import output, skeleton
from llmcompress.errors import BadInput, CorruptOutput


def read(folder):
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def resave(folder, change):
    """Rewrites a checkpoint folder with changed tensors."""
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})


def test_sharded_and_single_files_give_the_same(tmp_path, text, llama):
    sharded = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(llama).save_pretrained(sharded, max_shard_size="20KB")
    tiny.tokenizer().save_pretrained(sharded)
    assert len(list(sharded.glob("*.safetensors"))) > 3
    calibration = llmcompress.Calibration(str(text), 8, 32)
    for name, source in (("a", llama), ("b", sharded)):
        llmcompress.prune(source, "sparsegpt", "2:4", tmp_path / name, calibration)
    one, two = read(tmp_path / "a"), read(tmp_path / "b")
    assert one.keys() == two.keys() and all(torch.equal(tensor, two[name]) for name, tensor in one.items())


def test_float16_is_computed_in_float32_and_stored_in_float16(tmp_path, text):
    source = tiny.save("llama", tmp_path / "dense", torch.float16)
    result = llmcompress.prune(source, "fista", "2:4", tmp_path / "out", llmcompress.Calibration(str(text), 8, 32))
    assert all(tensor.dtype == torch.float16 for tensor in read(tmp_path / "out").values())
    assert result.totals["pruned linears"]["sparsity"] == pytest.approx(0.5, abs=0.01)


def test_mixed_dtypes_are_refused(tmp_path):
    source = tiny.save("llama", tmp_path / "dense")
    name = "model.layers.1.mlp.up_proj.weight"
    resave(source, lambda tensors: tensors.update({name: tensors[name].bfloat16()}))
    with pytest.raises(BadInput, match=f"mixes dtypes.*{name} in BF16"):
        llmcompress.prune(source, "magnitude", "2:4", tmp_path / "out")


def test_manifest_says_what_was_done(tmp_path, text, llama):
    calibration = llmcompress.Calibration(str(text), 8, 32, seed=4)
    llmcompress.prune(llama, "fista", "1:4", tmp_path / "out", calibration, targets=["mlp.*"], rounds=2)
    manifest = json.loads((tmp_path / "out" / "llmcompress.json").read_text())
    recipe = manifest["recipe"]
    assert recipe["method"] == "fista" and recipe["sparsity"] == "1:4" and recipe["targets"] == ["mlp.*"]
    assert recipe["options"]["rounds"] == 2 and recipe["error_correction"] == "sequential"
    used = recipe["calibration"]
    assert (used["samples"], used["seq_len"], used["seed"]) == (8, 32, 4) and len(used["tokens_sha256"]) == 64
    assert len(manifest["source_sha256"]) == 64
    assert [layer["layer"] for layer in manifest["layers"]] == [0, 1, 2]
    assert set(manifest["layers"][1]["linears"]) == {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    assert manifest["versions"]["torch"] == torch.__version__


def damage(kind):
    """Changes the tensors of the second layer on their way to the disk."""

    def change(path, tensors):
        if "00002-of" not in path.name:
            return tensors
        name = "model.layers.1.mlp.up_proj.weight"
        weight = tensors[name].clone()
        zero = (weight == 0).nonzero()[0]
        if kind == "pattern":
            weight[0] = 1.0
        elif kind == "nan":
            weight[0, 0] = float("nan")
        elif kind == "negative zero":
            weight[tuple(zero)] = -0.0
        elif kind == "value":
            alive = (weight != 0).nonzero()[0]
            weight[tuple(alive)] += 50
        elif kind == "dtype":
            weight = weight.bfloat16()
        elif kind == "norm":
            name = "model.layers.1.input_layernorm.weight"
            weight = tensors[name] + 1e-3
        elif kind == "lost":
            return {key: value for key, value in tensors.items() if key != name}
        return {**tensors, name: weight}

    return change


@pytest.mark.parametrize(
    ("kind", "told"),
    [("pattern", "without its 2:4 pattern"), ("nan", "NaN or Inf"), ("negative zero", "negative zeros"),
     ("value", "logits differ"), ("dtype", "changed from torch.float32|stores|mixes"), ("norm", "was to stay as it is"),
     ("lost", "up_proj.weight")],
)  # fmt: skip
@pytest.mark.parametrize("method", ["magnitude"])
def test_damage_on_the_way_to_the_disk_is_found(kind, told, method, tmp_path, llama, monkeypatch):
    real, change = output.save_file, damage(kind)
    monkeypatch.setattr(
        output, "save_file", lambda tensors, path, metadata: real(change(path, tensors), path, metadata)
    )
    with pytest.raises((CorruptOutput, BadInput), match=told):
        llmcompress.prune(llama, method, "2:4", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_error_before_the_first_layer_is_finished_leaves_nothing(tmp_path, llama, monkeypatch):
    monkeypatch.setattr(layerwise.Layerwise, "compress", lambda *args, **given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llmcompress.prune(llama, "magnitude", "2:4", tmp_path / "deep" / "er" / "out")
    assert list(tmp_path.iterdir()) == []


def test_overwrite_replaces_the_folder_whole(tmp_path, llama):
    llmcompress.prune(llama, "magnitude", "2:4", tmp_path / "out")
    (tmp_path / "out" / "left-over.txt").write_text("old")
    llmcompress.prune(llama, "magnitude", "1:4", tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out" / "left-over.txt").exists()
    assert json.loads((tmp_path / "out" / "llmcompress.json").read_text())["recipe"]["sparsity"] == "1:4"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_pruned_model_can_be_pruned_again(tmp_path, llama):
    llmcompress.prune(llama, "magnitude", "2:4", tmp_path / "once")
    result = llmcompress.prune(tmp_path / "once", "magnitude", "1:4", tmp_path / "twice")
    assert result.totals["pruned linears"]["sparsity"] == 0.75


def test_load_refuses_a_folder_that_would_open_with_random_weights(tmp_path, llama):
    folder = tmp_path / "model"
    AutoModelForCausalLM.from_pretrained(llama).save_pretrained(folder)
    assert llmcompress.load(folder).dtype == torch.float32
    resave(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(BadInput, match="missing keys.*layers.1.mlp.up_proj"):
        llmcompress.load(folder)
    resave(folder, lambda tensors: tensors.update({"model.layers.1.mlp.up_proj.weight": torch.ones(3, 3)}))
    with pytest.raises(BadInput):
        llmcompress.load(folder)


def test_skeleton_holds_no_weights(llama):
    from llmcompress.checkpoint.source import open_source

    empty = skeleton.Skeleton(open_source(llama))
    assert all(p.is_meta for p in empty.model.parameters())
    assert empty.read_layer(1).mlp.up_proj.weight.device.type == "cpu"
    assert all(p.is_meta for p in empty.model.parameters())
