"""Perplexity against float64, and the protocol: one stream, windows that don't overlap, mean over predicted tokens."""

import copy
import json
import math

import datasets
import pytest
import tiny
import torch
from click.testing import CliRunner
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM

import llmcompress
from llmcompress.cli import main
from llmcompress.errors import BadInput, NumericalFailure
from llmcompress.evaluate.perplexity import perplexity, window_tokens


def exact(model, ids, seq_len, count=None):
    """exp of the mean over predicted tokens of -log p, in float64, token by token."""
    model = copy.deepcopy(model).double()
    losses = []
    for start in range(0, len(ids) - seq_len + 1, seq_len)[:count]:
        window = torch.tensor(ids[start : start + seq_len])
        with torch.no_grad():
            logits = model(input_ids=window[None], use_cache=False).logits[0]
        for position in range(seq_len - 1):
            row = logits[position].tolist()
            top = max(row)
            total = math.fsum(math.exp(value - top) for value in row)
            losses.append(math.log(total) + top - row[window[position + 1]])
    return math.exp(math.fsum(losses) / len(losses))


def ids_of(text):
    return tiny.tokenizer()(text.read_text())["input_ids"]


def run(*words):
    return CliRunner().invoke(main, ["eval", *map(str, words)], catch_exceptions=False)


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """340 tokens."""
    return tiny.write_text(tmp_path_factory.mktemp("short") / "short.txt", 340, seed=3)


@pytest.mark.parametrize("family", ["llama", "gemma2", "opt"])
def test_equals_float64(family, short):
    model = tiny.build(family)
    windows = window_tokens(str(short), tiny.tokenizer(), 48)
    assert windows.shape == (7, 48)
    found = perplexity(model, windows, "short")
    assert found.value == pytest.approx(exact(model, ids_of(short), 48), rel=1e-5)
    assert (found.source, found.seq_len, found.windows) == ("short", 48, 7)


def test_bfloat16_logits_are_summed_in_float32(short):
    model = tiny.build("llama", torch.bfloat16)
    windows = window_tokens(str(short), tiny.tokenizer(), 64)
    losses = []
    with torch.no_grad():
        for window in windows:
            logits = model(input_ids=window[None]).logits[0, :-1].double()
            losses += (-logits.log_softmax(-1).gather(1, window[1:, None])).flatten().tolist()
    assert perplexity(model, windows).value == pytest.approx(math.exp(math.fsum(losses) / len(losses)), rel=1e-5)


def test_model_that_knows_nothing_has_the_perplexity_of_its_vocabulary(short):
    model = tiny.build("llama")
    with torch.no_grad():
        model.lm_head.weight.zero_()
    windows = window_tokens(str(short), tiny.tokenizer(), 50)
    assert perplexity(model, windows).value == pytest.approx(tiny.VOCABULARY, rel=1e-6)


def test_each_window_is_read_alone(short):
    model = tiny.build("llama")
    windows = window_tokens(str(short), tiny.tokenizer(), 70)
    alone = [math.log(perplexity(model, window[None]).value) for window in windows]
    assert perplexity(model, windows).value == pytest.approx(math.exp(sum(alone) / len(alone)), rel=1e-6)
    assert len({round(loss, 4) for loss in alone}) == len(windows)


def test_windows_do_not_overlap_and_the_rest_is_left_out(short):
    windows = window_tokens(str(short), tiny.tokenizer(), 60)
    assert windows.flatten().tolist() == ids_of(short)[:300]
    assert window_tokens(str(short), tiny.tokenizer(), 60, 2).flatten().tolist() == ids_of(short)[:120]
    assert len(window_tokens(str(short), tiny.tokenizer(), 60, 99)) == 5
    assert window_tokens(str(short), tiny.tokenizer(), 340).shape == (1, 340)
    with pytest.raises(BadInput, match="short.txt holds 340 tokens, fewer than one window of 341"):
        window_tokens(str(short), tiny.tokenizer(), 341)


def test_special_tokens_are_put_once_in_front_of_the_stream(short):
    tokenizer = tiny.tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    assert window_tokens(str(short), tokenizer, 60).flatten().tolist() == [1, *ids_of(short)[:299]]


def test_wikitext2_is_the_raw_test_split_as_one_text(monkeypatch):
    asked = []

    def load_dataset(*given, **named):
        asked.append((given, named.get("split")))
        return {"text": ["", "w1 w2\n", "w3 w4\n"]}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    texts = []
    tokenizer = tiny.tokenizer()
    windows = window_tokens("wikitext2", lambda text, **given: texts.append(text) or tokenizer(text, **given), 2)
    assert asked == [(("Salesforce/wikitext", "wikitext-2-raw-v1"), "test")]
    assert texts == ["\n\nw1 w2\n\n\nw3 w4\n"]
    assert windows.tolist() == [[5, 6], [7, 8]]


def test_command_on_a_dense_and_a_compressed_model(llama, text, short, tmp_path):
    llmcompress.prune(llama, "magnitude", "2:4", tmp_path / "sparse")
    values = []
    for folder in (llama, tmp_path / "sparse"):
        result = run(folder, "--perplexity", short, "--seq-len", 48, "--device", "cpu", "--quiet")
        assert result.exit_code == 0 and result.stderr == ""
        plain = AutoModelForCausalLM.from_pretrained(folder)
        values.append(float(result.stdout))
        assert result.stdout == f"{values[-1]:.6g}\n"
        assert values[-1] == pytest.approx(exact(plain, ids_of(short), 48), rel=1e-5)
    assert abs(values[0] - values[1]) > 1e-4 * values[0]


def test_max_windows(llama, short):
    found = float(
        run(llama, "--perplexity", short, "--seq-len", 48, "--max-windows", 2, "--device", "cpu", "--quiet").stdout
    )
    plain = AutoModelForCausalLM.from_pretrained(llama)
    assert found == pytest.approx(exact(plain, ids_of(short), 48, 2), rel=1e-5)
    assert found != pytest.approx(exact(plain, ids_of(short), 48), rel=1e-5)


def test_number_comes_with_how_it_was_measured(llama, short):
    result = run(llama, "--perplexity", short, "--seq-len", 48, "--device", "cpu")
    assert result.stdout.startswith("perplexity 1")
    assert f"{llama} on {short}, 7 windows of 48 tokens, not overlapping" in result.stdout
    assert result.stdout.count("\n") == 1


@pytest.mark.parametrize(("positions", "length"), [(128, 128), (4096, 2048)])
def test_default_window_is_2048_or_what_the_model_has(positions, length, text, tmp_path):
    folder = tiny.save("llama", tmp_path, num_hidden_layers=1, max_position_embeddings=positions)
    assert f"windows of {length} tokens" in run(folder, "--perplexity", text, "--device", "cpu").stdout


def test_broken_model_has_no_perplexity(short, tmp_path):
    model = tiny.build("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(NumericalFailure, match="on short.txt holds NaN or Inf"):
        perplexity(model, window_tokens(str(short), tiny.tokenizer(), 48), "short.txt")
    model.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    result = run(tmp_path, "--perplexity", short, "--seq-len", 48, "--device", "cpu")
    assert result.exit_code == 1
    assert result.stdout == "" and result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1


def test_dtype_of_the_file_is_what_is_measured(short, tmp_path):
    folder = tiny.save("llama", tmp_path, torch.bfloat16)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    found = float(run(folder, "--perplexity", short, "--seq-len", 48, "--device", "cpu", "--quiet").stdout)
    windows = window_tokens(str(short), tiny.tokenizer(), 48)
    assert found == pytest.approx(perplexity(tiny.build("llama", torch.bfloat16), windows).value, rel=1e-5)
    assert found != pytest.approx(perplexity(tiny.build("llama"), windows).value, rel=1e-5)
