"""Whatever can't be used is refused in one sentence with exit code 2, and nothing is left behind."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import namedtuple

import pyarrow
import pyarrow.parquet
import pytest
import tiny
import torch
import transformers
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from llmcompress.cli import main


class Bed:
    """A folder with a model, a text and whatever a case adds."""

    def __init__(self, folder, llama, text):
        self.folder, self.llama, self.text = folder, llama, text

    def file(self, name, content):
        path = self.folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def folder_of(self, name):
        (self.folder / name).mkdir()
        return self.folder / name

    def table(self, **columns):
        path = self.folder / "table.parquet"
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
        return path

    def model(self, *edits):
        folder = shutil.copytree(self.llama, self.folder / "model")
        for edit in edits:
            edit(folder)
        return folder

    def other(self, family, **over):
        return tiny.save(family, self.folder / "model", **over)

    def architecture(self, name, **settings):
        config = getattr(transformers, settings.pop("config"))(vocab_size=tiny.VOCABULARY, **settings)
        getattr(transformers, name)(config).save_pretrained(self.folder / "model")
        return self.folder / "model"


def config(**values):
    def edit(folder):
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return edit


def content(name, value):
    return lambda folder: (folder / name).write_bytes(value)


def first_bytes(name, share):
    def edit(folder):
        path = sorted(folder.glob(name))[-1]
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])

    return edit


def sharded(folder):
    tiny.build("llama").save_pretrained(folder, max_shard_size="30KB")
    (folder / "model.safetensors").unlink()


def weight(name, change):
    def edit(folder):
        path = folder / "model.safetensors"
        tensors = load_file(path)
        tensors[name] = change(tensors[name])
        save_file(tensors, path, metadata={"format": "pt"})

    return edit


def filled(value):
    def change(tensor):
        tensor.view(-1)[5] = value
        return tensor

    return change


def removed(*patterns):
    return lambda folder: [path.unlink() for pattern in patterns for path in folder.glob(pattern)]


def pickled(folder):
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    return folder


def link_to_nowhere(bed):
    (bed.folder / "link").symlink_to(bed.folder / "nowhere")
    return bed.folder / "link"


BERT = {"config": "BertConfig", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 4}  # fmt: skip
T5 = {"config": "T5Config", "d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 1, "num_heads": 4}
GPT2 = {"config": "GPT2Config", "n_embd": 32, "n_layer": 1, "n_head": 4}
UP = "model.layers.1.mlp.up_proj.weight"
ACCEPTED = "use n:m with 0 < n < m, n being the number kept (2:4), or the share to remove, 0 <= share < 1"

# name: options to change or add (a function makes its value from the bed; True is a flag), what the sentence says.
Case = namedtuple("Case", "name options words")
CASES = [
    Case("method", {"--method": "fist"}, ["'fist'", "did you mean fista?", "sparsegpt, wanda, magnitude"]),
    Case("method_far_from_any", {"--method": "xyz"}, ["'xyz'", "methods: fista, sparsegpt, wanda, magnitude"]),
    *[
        Case(f"sparsity_{value}", {"--sparsity": value}, [value, ACCEPTED])
        for value in ("1.5", "3:2", "abc", "-0.1", "1", "4:4", "0:4", "-2:4", "2:4:8", "nan", "inf", "50%", "1/0")
    ],
    Case("width", {"--model": lambda b: b.other("llama", intermediate_size=50)},
         ["model.layers.0.mlp.down_proj", "2:4", "input width 50 is not divisible by 4"]),
    Case("width_of_another_m", {"--sparsity": "3:5"}, ["model.layers.0.mlp.down_proj", "width 48", "divisible by 5"]),
    # Calibration.
    Case("text_empty", {"--calibration": lambda b: b.file("empty.txt", "")}, ["empty.txt holds 0 tokens", "need 128"]),
    Case("text_short", {"--calibration": lambda b: b.file("short.txt", "w1 w2 w3")},
         ["short.txt holds 3 tokens", "4 samples of 32 need 128", "--samples or --seq-len"]),
    Case("text_missing", {"--calibration": "gone.txt"}, ["gone.txt", "give a .txt, .jsonl or .parquet file"]),
    Case("text_is_folder", {"--calibration": lambda b: b.llama}, ["is no file"]),
    Case("text_nameless", {"--calibration": ""}, ["calibration", "is no file"]),
    Case("text_of_other_kind", {"--calibration": lambda b: b.file("x.csv", "a,b")},
         ["x.csv must end in .txt, .jsonl or .parquet"]),
    Case("text_latin1", {"--calibration": lambda b: b.file("l.txt", b"caf\xe9 " * 900)}, ["l.txt is not UTF-8"]),
    Case("jsonl_latin1", {"--calibration": lambda b: b.file("l.jsonl", b'{"text": "caf\xe9"}\n')},
         ["l.jsonl is not UTF-8"]),
    Case("jsonl_field", {"--calibration": lambda b: b.file("a.jsonl", '{"body": "w1"}\n')},
         ["a.jsonl line 1", "no text under 'text'", "it has: body", "--text-field"]),
    Case("jsonl_number", {"--calibration": lambda b: b.file("a.jsonl", '{"text": "w1"}\n\n{"text": 3}\n')},
         ["a.jsonl line 3", "no text under 'text'"]),
    Case("jsonl_list", {"--calibration": lambda b: b.file("a.jsonl", '["w1"]\n')}, ["a.jsonl line 1", "list"]),
    Case("jsonl_broken", {"--calibration": lambda b: b.file("a.jsonl", '{"text": "w1"}\n{"text":\n')},
         ["a.jsonl line 2 is not JSON"]),
    Case("jsonl_other_field", {"--calibration": lambda b: b.file("a.jsonl", '{"text": "w1"}\n'),
                               "--text-field": "body"}, ["no text under 'body'", "it has: text"]),
    Case("parquet_broken", {"--calibration": lambda b: b.file("a.parquet", "PAR1 and no more")},
         ["a.parquet is not a parquet file"]),
    Case("parquet_field", {"--calibration": lambda b: b.table(body=["w1"])}, ["no text under 'text'", "it has: body"]),
    Case("parquet_null", {"--calibration": lambda b: b.table(text=["w1", None])}, ["no text under 'text'"]),
    Case("hub_offline", {"--calibration": "c4"}, ["'c4'", "can't be streamed", "or 'self'"]),
    Case("hub_name", {"--calibration": "no such name"}, ["'no such name'", "or 'self'"]),
    Case("seq_len_beyond_model", {"--seq-len": 129}, ["--seq-len 129", "the model's 128 positions"]),
    Case("seq_len_negative", {"--seq-len": -4}, ["--seq-len -4", "use 8 or more"]),
    Case("samples_none", {"--samples": 0}, ["--samples 0", "use 1 or more"]),
    Case("samples_negative", {"--samples": -3}, ["--samples -3", "use 1 or more"]),
    Case("seed_negative", {"--seed": -1}, ["--seed -1", "use 0 to"]),
    Case("seed_too_large", {"--seed": 2**64}, [f"--seed {2**64}", "use 0 to"]),
    # The model.
    Case("model_missing", {"--model": "no/such"}, ["'no/such'", "give a path that exists"]),
    Case("model_missing_path", {"--model": lambda b: b.folder / "gone"}, ["gone'", "is no folder or .gguf file"]),
    Case("model_is_file", {"--model": lambda b: b.text}, ["is a file; give a model folder"]),
    Case("model_folder_empty", {"--model": lambda b: b.folder_of("bare")}, ["bare has no config.json"]),
    Case("model_without_weights", {"--model": lambda b: b.model(removed("*.safetensors"))},
         ["has no .safetensors weights"]),
    Case("model_without_tokenizer", {"--model": lambda b: b.model(removed("tokenizer*", "special*"))},
         ["no tokenizer could be loaded"]),
    Case("encoder", {"--model": lambda b: b.architecture("BertForMaskedLM", **BERT)},
         ["bert model (BertForMaskedLM)", "not a decoder-only", "CausalLM"]),
    Case("encoder_bare", {"--model": lambda b: b.architecture("BertModel", **BERT)}, ["(BertModel)", "CausalLM"]),
    Case("encoder_decoder", {"--model": lambda b: b.architecture("T5ForConditionalGeneration", **T5)},
         ["t5 model", "not a decoder-only"]),
    Case("family", {"--model": lambda b: b.architecture("GPT2LMHeadModel", **GPT2)},
         ["'gpt2' is not a supported", "llama", "families/llama.py"]),
    Case("weights_truncated", {"--model": lambda b: b.model(first_bytes("model.safetensors", 0.6))},
         ["model.safetensors is not a whole safetensors file", "fetch it again"]),
    Case("weights_empty", {"--model": lambda b: b.model(content("model.safetensors", b""))},
         ["model.safetensors is not a whole safetensors file"]),
    Case("weights_garbage", {"--model": lambda b: b.model(content("model.safetensors", b"<html>" * 99))},
         ["model.safetensors is not a whole safetensors file"]),
    Case("shard_truncated", {"--model": lambda b: b.model(sharded, first_bytes("model-*.safetensors", 0.9))},
         ["model-0000", "is not a whole safetensors file"]),
    Case("shard_missing", {"--model": lambda b: b.model(sharded, removed("model-00002-*.safetensors"))},
         ["shard model-00002-", "is listed in its index and missing"]),
    Case("index_broken", {"--model": lambda b: b.model(sharded, content("model.safetensors.index.json", b"{"))},
         ["model.safetensors.index.json is not a safetensors index"]),
    Case("index_of_other_kind", {"--model": lambda b: b.model(sharded, content("model.safetensors.index.json", b"[]"))},
         ["model.safetensors.index.json is not a safetensors index"]),
    Case("nan", {"--model": lambda b: b.model(weight(UP, filled(float("nan"))))}, [UP, "holds NaN or Inf"]),
    Case("inf_in_embeddings", {"--model": lambda b: b.model(weight("model.embed_tokens.weight", filled(-torch.inf)))},
         ["model.embed_tokens.weight", "holds NaN or Inf"]),
    Case("nan_and_self", {"--model": lambda b: b.model(weight(UP, filled(float("nan")))), "--calibration": "self"},
         [UP, "holds NaN or Inf"]),
    Case("nan_without_data", {"--model": lambda b: b.model(weight(UP, filled(torch.inf))), "--method": "magnitude"},
         [UP, "holds NaN or Inf"]),
    Case("dtype", {"--model": lambda b: b.model(weight(UP, lambda w: w.to(torch.float8_e4m3fn)))},
         ["mixes dtypes", f"{UP} in F8_E4M3"]),
    Case("shape_in_layer", {"--model": lambda b: b.model(config(intermediate_size=64))},
         ["model.layers.0.mlp.", "has shape (", "the config asks for ("]),
    Case("shape_outside_layers", {"--model": lambda b: b.model(config(vocab_size=256))},
         ["has shape (128, 32)", "the config asks for (256, 32)"]),
    Case("layers_missing", {"--model": lambda b: b.model(config(num_hidden_layers=4))},
         ["lacks the tensor model.layers.3."]),
    Case("layers_left_over", {"--model": lambda b: b.model(config(num_hidden_layers=2))},
         ["holds model.layers.2.", "2 layers"]),
    Case("quantised", {"--model": lambda b: b.model(config(quantization_config={"quant_method": "gptq", "bits": 4}))},
         ["is quantised; give the unquantised checkpoint"]),
    Case("config_broken", {"--model": lambda b: b.model(content("config.json", b"{"))}, ["config.json can't be used"]),
    Case("config_empty", {"--model": lambda b: b.model(content("config.json", b"{}"))}, ["config.json can't be used"]),
    Case("config_unknown_type", {"--model": lambda b: b.model(config(model_type="nonesuch"))},
         ["config.json can't be used", "nonesuch"]),
    Case("config_contradiction", {"--model": lambda b: b.model(config(num_attention_heads=5))},
         ["config.json can't be used", "number of attention heads (5)"]),
    Case("config_type", {"--model": lambda b: b.model(config(hidden_size="wide"))},
         ["config.json can't be used", "'hidden_size'"]),
    Case("tokenizer_of_another_model", {"--model": lambda b: b.other("llama", vocab_size=64)},
         ["its tokenizer gives token 12", "its model has 64"]),
    Case("pickled", {"--model": lambda b: pickled(b.model())},
         ["holds only pytorch_model.bin", "can run code", "save_pretrained(NEW_DIR)"]),
    Case("pickled_file", {"--model": lambda b: pickled(b.model()) / "pytorch_model.bin"},
         ["pytorch_model.bin: pickled files", "save_pretrained(NEW_DIR)"]),
    Case("gguf_missing", {"--model": "gone.gguf"}, ["gone.gguf does not exist"]),
    Case("gguf_of_other_kind", {"--model": lambda b: b.file("a.gguf", "hello world")}, ["a.gguf is not a GGUF file"]),
    Case("gguf_truncated", {"--model": lambda b: b.file("a.gguf", b"GGUF\x03\0\0\0")},
         ["a.gguf can't be read as GGUF"]),
    # Targets.
    Case("target_head", {"--targets": "lm_head"}, ["'lm_head'", "never pruned", "'mlp.*'"]),
    Case("target_embeddings", {"--targets": "model.embed_tokens"}, ["'model.embed_tokens'", "never pruned"]),
    Case("target_tied_head", {"--model": lambda b: b.other("qwen2"), "--targets": "lm_head"},
         ["'lm_head'", "tied to each other", "never pruned"]),
    Case("target_norm", {"--targets": "input_layernorm"}, ["'input_layernorm' matches no linear", "mlp.down_proj"]),
    Case("one_target_of_two", {"--targets": ["mlp.*", "self_atn.*"]}, ["'self_atn.*' matches no linear"]),
    # The output.
    Case("out_exists", {"--out": lambda b: b.folder_of("there")}, ["there exists", "--overwrite"]),
    Case("out_is_file", {"--out": lambda b: b.file("there", ""), "--overwrite": True}, ["there is a file"]),
    Case("out_is_source", {"--out": lambda b: b.llama, "--overwrite": True}, ["holds the model that is read"]),
    Case("out_holds_other_things", {"--out": lambda b: b.file("notes.txt", "").parent, "--overwrite": True},
         ["holds something other than a checkpoint"]),
    Case("out_in_file", {"--out": lambda b: b.file("there", "") / "deep" / "out"},
         ["can't be written", "there is no folder", "choose another folder"]),
    Case("out_link_to_nowhere", {"--out": link_to_nowhere}, ["is a link to nowhere"]),
    Case("out_root", {"--out": "/", "--overwrite": True}, ["--out / is no name"]),
    Case("out_dots", {"--out": lambda b: b.folder / "new" / ".."}, [".. is no name of a new folder"]),
    Case("out_name_too_long", {"--out": lambda b: b.folder / ("long" * 63)}, ["can't be written", "too long"]),
    # Other options.
    Case("option_of_another_method", {"--damp": 0.1}, ["--damp is no option of wanda", "belongs to sparsegpt"]),
    Case("option_out_of_range", {"--method": "fista", "--rounds": -1}, ["--rounds -1", "use 0 to 1000"]),
    Case("option_nan", {"--method": "sparsegpt", "--damp": "nan"}, ["--damp nan", "use 0 to 1000"]),
    *[
        Case(f"device_{name}", {"--device": name}, [f"--device {name}", "use cpu, cuda, cuda:N or auto"])
        for name in ("gpu", "mps", "meta", "cpu:x")
    ],
    Case("device_absent", {"--device": "cuda:99"}, ["--device cuda:99", "torch sees"]),
    Case("memory_unreadable", {"--max-memory": "banana"}, ["--max-memory banana", "4GiB"]),
    Case("memory_too_little", {"--max-memory": "1MiB"}, ["--max-memory 0.00 GiB is too little", "give more"]),
    Case("workers_none", {"--workers": 0}, ["--workers 0", "use 1 or more"]),
    Case("workers_on_dependent_layers", {"--workers": 2, "--error-correction": "sequential"},
         ["--workers 2", "--error-correction layer"]),
    Case("perplexity_missing", {"--perplexity": "gone.txt"}, ["gone.txt: no such file"]),
    Case("perplexity_short", {"--perplexity": lambda b: b.file("short.txt", "w1 w2")},
         ["short.txt holds 2 tokens", "one window of 128"]),
    Case("perplexity_latin1", {"--perplexity": lambda b: b.file("l.txt", b"caf\xe9 " * 900)}, ["l.txt is not UTF-8"]),
    Case("perplexity_offline", {"--perplexity": "wikitext2"}, ["wikitext2 can't be fetched"]),
    Case("log_in_file", {"--log-json": lambda b: b.file("log", "") / "x"}, ["--log-json", "can't be written"]),
]  # fmt: skip


@pytest.fixture
def bed(tmp_path, llama, text, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLMCOMPRESS_CACHE", str(tmp_path / "cache"))
    return Bed(tmp_path, llama, text)


def arguments(bed, options):
    given = {
        "--model": bed.llama, "--method": "wanda", "--sparsity": "2:4", "--out": bed.folder / "out",
        "--calibration": bed.text, "--samples": 4, "--seq-len": 32, "--device": "cpu",
    }  # fmt: skip
    given |= {name: value(bed) if callable(value) else value for name, value in options.items()}
    words = ["prune"]
    for name, values in given.items():
        for value in values if isinstance(values, list) else [values]:
            words += [name] if value is True else [name, str(value)]
    return words


def standing(folder):
    """Every path below a folder, the hidden ones too, with the bytes of files."""
    found = {}
    for root, folders, files in os.walk(folder):
        found |= {os.path.join(root, name): None for name in folders}
        for name in files:
            path = os.path.join(root, name)
            if os.path.islink(path):
                found[path] = os.readlink(path)
                continue
            with open(path, "rb") as file:
                found[path] = file.read()
    return found


def assert_one_sentence(exit_code, stdout, stderr, words):
    assert exit_code == 2, stderr
    assert stdout == ""
    assert re.fullmatch(r"Error: [^\n]{20,}\n", stderr), stderr
    for word in words:
        assert str(word) in stderr


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_refused_in_one_sentence_leaving_nothing(case, bed):
    command = arguments(bed, case.options)
    before = standing(bed.folder), standing(bed.llama)
    result = CliRunner().invoke(main, command)
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert_one_sentence(result.exit_code, result.stdout, result.stderr, case.words)
    assert (standing(bed.folder), standing(bed.llama)) == before


# With the interpreter's own exit, and whatever libraries print on the way.
@pytest.mark.parametrize("name", ["method", "sparsity_3:2", "text_short", "encoder", "shard_truncated", "nan_and_self"])
def test_refused_in_a_process_of_its_own(name, bed):
    case = next(case for case in CASES if case.name == name)
    command = arguments(bed, case.options)
    before = standing(bed.folder)
    done = subprocess.run([sys.executable, "-m", "llmcompress.cli", *command], capture_output=True, text=True)
    assert_one_sentence(done.returncode, done.stdout, done.stderr, case.words)
    assert standing(bed.folder) == before


def test_same_command_with_good_input_is_taken(bed):
    result = CliRunner().invoke(main, arguments(bed, {}), catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    assert (bed.folder / "out" / "config.json").is_file()


def test_width_that_is_not_targeted_does_not_matter(bed):
    odd = {"--model": lambda b: b.other("llama", intermediate_size=50)}
    result = CliRunner().invoke(main, arguments(bed, {**odd, "--targets": ["self_attn.*", "mlp.up_proj"]}))
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"--sparsty": "2:4"}, "No such option '--sparsty'. Did you mean '--sparsity'?"),
        ({"--samples": "many"}, "'many' is not a valid integer"),
        ({"--error-correction": "some"}, "'some' is not one of 'layer', 'sequential', 'model', 'off'"),
        ({"--warm-start": "cold"}, "'cold' is not one of 'sparsegpt', 'wanda', 'magnitude', 'dense'"),
    ],
)
def test_words_that_are_no_options_are_told_in_the_last_line(options, words, bed):
    result = CliRunner().invoke(main, arguments(bed, options))
    assert result.exit_code == 2 and result.stdout == ""
    last = result.stderr.splitlines()[-1]
    assert last.startswith("Error: ") and words in last
    assert standing(bed.folder) == {}


def test_no_permission_at_out(bed):
    closed = bed.folder_of("closed")
    closed.chmod(0o555)
    if os.access(closed, os.W_OK):
        pytest.skip("this user may write everywhere")
    result = CliRunner().invoke(main, arguments(bed, {"--out": closed / "new" / "out"}))
    assert_one_sentence(result.exit_code, result.stdout, result.stderr, ["can't be written", f"permission in {closed}"])


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a file system where nobody can make a folder")
def test_folder_that_nobody_can_make(bed):
    result = CliRunner().invoke(main, arguments(bed, {"--out": "/proc/self/new/out"}))
    assert_one_sentence(result.exit_code, result.stdout, result.stderr, ["--out /proc/self/new/out can't be written"])


def test_no_space_at_out(bed, monkeypatch):
    usage = shutil.disk_usage(bed.folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=50_000))
    result = CliRunner().invoke(main, arguments(bed, {"--out": bed.folder / "new" / "out"}))
    assert_one_sentence(result.exit_code, result.stdout, result.stderr, ["needs 0.00 GB", "has 0.00 GB free"])
    assert standing(bed.folder) == {}


def test_taken_folder_is_refused_before_tokens_are_drawn(bed, monkeypatch):
    monkeypatch.setattr("llmcompress.pipeline.draw_tokens", lambda *given: pytest.fail("tokens were drawn"))
    result = CliRunner().invoke(main, arguments(bed, {"--out": bed.folder_of("there")}), catch_exceptions=False)
    assert_one_sentence(result.exit_code, result.stdout, result.stderr, ["there exists"])


EVAL_CASES = [
    ("text_missing", {"--perplexity": "gone.txt"}, ["gone.txt: no such file", "wikitext2"]),
    ("text_short", {"--perplexity": lambda b: b.file("short.txt", "w1 w2")},
     ["short.txt holds 2 tokens", "one window of 32", "lower --seq-len"]),
    ("text_latin1", {"--perplexity": lambda b: b.file("l.txt", b"caf\xe9 " * 900)}, ["l.txt is not UTF-8"]),
    ("hub_offline", {"--perplexity": "wikitext2"}, ["wikitext2 can't be fetched", "give a text file"]),
    ("seq_len_short", {"--seq-len": 1}, ["--seq-len 1: use 2 to 128"]),
    ("seq_len_long", {"--seq-len": 129}, ["--seq-len 129: use 2 to 128"]),
    ("device", {"--device": "gpu"}, ["--device gpu: use cpu"]),
    ("model_missing", {"MODEL": "no/such"}, ["'no/such'", "give a path that exists"]),
    ("encoder", {"MODEL": lambda b: b.architecture("BertForMaskedLM", **BERT)}, ["not a decoder-only"]),
    ("layers_missing", {"MODEL": lambda b: b.model(config(num_hidden_layers=4))}, ["missing keys", "model.layers.3."]),
    ("layers_left_over", {"MODEL": lambda b: b.model(config(num_hidden_layers=2))}, ["unexpected keys"]),
    ("shape", {"MODEL": lambda b: b.model(config(intermediate_size=64))}, ["can't be opened"]),
    ("tokenizer", {"MODEL": lambda b: b.other("llama", vocab_size=64)}, ["its model has 64"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "words"), EVAL_CASES, ids=[name for name, *_ in EVAL_CASES])
def test_eval_refuses_in_one_sentence(name, options, words, bed, monkeypatch):
    given = {"MODEL": bed.llama, "--perplexity": bed.text, "--seq-len": 32, "--device": "cpu", **options}
    given = {key: value(bed) if callable(value) else value for key, value in given.items()}
    command = ["eval", str(given.pop("MODEL")), *[str(word) for pair in given.items() for word in pair]]
    result = CliRunner().invoke(main, command)
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert_one_sentence(result.exit_code, result.stdout, result.stderr, words)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda b: "no/such", "'no/such'"),
        (lambda b: b.architecture("BertModel", **BERT), "not a decoder-only"),
        (lambda b: pickled(b.model()), "can run code"),
        (lambda b: b.model(first_bytes("model.safetensors", 0.5)), "not a whole safetensors file"),
    ],
)
def test_inspect_refuses_in_one_sentence(model, words, bed):
    result = CliRunner().invoke(main, ["inspect", str(model(bed))])
    assert_one_sentence(result.exit_code, result.stdout, result.stderr, [words])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"--out": lambda b: b.folder_of("there")}, "there exists"),
        ({"--out": lambda b: b.file("there", "") / "out"}, "there is no folder"),
        ({"--model": "no/such"}, "'no/such'"),
        ({"--perplexity": lambda b: b.file("short.txt", "w1")}, "short.txt holds 1 tokens"),
    ],
)
def test_quickstart_refuses_before_any_work(options, words, bed):
    given = {"--model": bed.llama, "--out": bed.folder / "out", "--calibration": bed.text, "--perplexity": bed.text}
    given |= {key: value(bed) if callable(value) else value for key, value in options.items()}
    before = standing(bed.folder)
    result = CliRunner().invoke(main, ["quickstart", *[str(word) for pair in given.items() for word in pair]])
    assert_one_sentence(result.exit_code, result.stdout, result.stderr, [words])
    assert standing(bed.folder) == before
