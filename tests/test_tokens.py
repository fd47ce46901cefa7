"""Calibration tokens: from files, the hub and the model itself; the same each time, and no more read than needed."""

import hashlib
import itertools
import json
import types

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import tiny
import torch
from tokenizers.processors import TemplateProcessing

import llmcompress
from llmcompress import Calibration
from llmcompress.calibration import sample, tokens
from llmcompress.checkpoint.source import open_source
from llmcompress.errors import BadInput, NumericalFailure
from llmcompress.pipeline import draw_tokens


def never():
    raise AssertionError("the model was asked for text")


def draw(source, samples=6, seq_len=16, tokenizer=None, **settings):
    return Calibration(str(source), samples, seq_len, **settings).tokens(tokenizer or tiny.tokenizer(), never)


def with_bos():
    """The tiny tokenizer, putting <s> in front as those of Llama and Gemma do."""
    tokenizer = tiny.tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def stream(path):
    return tiny.tokenizer()(path.read_text())["input_ids"]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_samples_are_distinct_blocks_of_the_text(text):
    ids = draw(text, 20, 24)
    assert ids.shape == (20, 24) and ids.dtype == torch.int64
    whole = torch.tensor(stream(text))
    blocks = whole[: len(whole) // 24 * 24].view(-1, 24)
    places = [(blocks == row).all(1).nonzero().flatten().tolist() for row in ids]
    assert all(len(place) == 1 for place in places)
    assert len({place[0] for place in places}) == 20
    assert places != sorted(places)


def test_seed_decides_the_draw(text):
    assert torch.equal(draw(text, seed=3), draw(text, seed=3))
    assert not torch.equal(draw(text, seed=3), draw(text, seed=4))


def test_same_words_in_any_format_give_the_same_tokens(text, tmp_path):
    lines = text.read_text().splitlines()
    rows = write_rows(tmp_path / "a.jsonl", [{"id": i, "text": line} for i, line in enumerate(lines)])
    named = write_rows(tmp_path / "b.jsonl", [{"body": line} for line in lines])
    pyarrow.parquet.write_table(pyarrow.table({"text": lines}), tmp_path / "a.parquet", row_group_size=7)
    # So many that all of the text is in the pool.
    expected = draw(text, 15)
    assert torch.equal(draw(rows, 15), expected)
    assert torch.equal(draw(named, 15, text_field="body"), expected)
    assert torch.equal(draw(tmp_path / "a.parquet", 15), expected)


def test_pieces_of_a_long_text_give_the_same_tokens(text, monkeypatch):
    whole = draw(text, 15)
    monkeypatch.setattr(tokens, "PIECE", 1000)
    assert len(list(tokens.documents(str(text), "text"))) > 5
    assert torch.equal(draw(text, 15), whole)


def test_just_enough_tokens_are_enough(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("w5 " * 60)
    assert draw(path, 5, 12).shape == (5, 12)
    path.write_text("w5 " * 59)
    with pytest.raises(BadInput, match="a.txt holds 59 tokens; 5 samples of 12 need 60"):
        draw(path, 5, 12)


def test_each_block_starts_with_bos_where_the_tokenizer_adds_it(text):
    ids = draw(text, 6, 16, with_bos())
    assert ids.shape == (6, 16)
    assert (ids[:, 0] == 1).all() and not (ids[:, 1:] == 1).any()
    whole = torch.tensor(stream(text))
    blocks = whole[: len(whole) // 15 * 15].view(-1, 15)
    assert all((blocks == row[1:]).all(1).any() for row in ids)


def test_bos_counts_as_a_token_of_the_block(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("w5 " * 55)
    assert draw(path, 5, 12, with_bos()).shape == (5, 12)
    path.write_text("w5 " * 54)
    with pytest.raises(BadInput, match="holds 54 tokens; 5 samples of 12 need 55"):
        draw(path, 5, 12, with_bos())


def test_rows_beyond_the_pool_are_not_read(tmp_path):
    rows = write_rows(tmp_path / "a.jsonl", [{"text": "w5 w6 w7 w8"}] * (tokens.POOL * 2 * 8 // 4))
    with open(rows, "a") as file:
        file.write("this is no JSON\n")
    assert draw(rows, 2, 8).shape == (2, 8)
    with pytest.raises(BadInput, match="is not JSON"):
        draw(rows, 3, 8)


def test_fingerprint_is_of_the_ids():
    ids = torch.arange(24).view(2, 12)
    exact = hashlib.sha256(b"".join(i.to_bytes(8, "little") for i in range(24))).hexdigest()
    assert tokens.fingerprint(ids) == exact
    assert tokens.fingerprint(ids.T.contiguous().T) == exact
    ids[1, 3] += 1
    assert tokens.fingerprint(ids) != exact


def test_manifest_says_what_was_calibrated_on(llama, text, tmp_path):
    calibration = Calibration(str(text), 6, seed=5)
    llmcompress.prune(llama, "wanda", "2:4", tmp_path / "out", calibration)
    recorded = json.loads((tmp_path / "out" / "llmcompress.json").read_text())["recipe"]["calibration"]
    drawn = draw_tokens(open_source(llama), calibration)
    assert drawn.shape == (6, 128)
    assert recorded == {
        "source": str(text), "samples": 6, "seq_len": 128, "seed": 5, "text_field": "text",
        "tokens_sha256": tokens.fingerprint(drawn),
    }  # fmt: skip


@pytest.mark.parametrize(("positions", "length"), [(128, 128), (2048, 2048), (131072, 2048), (None, 2048)])
def test_default_length_is_2048_or_what_the_model_has(positions, length):
    config = types.SimpleNamespace(max_position_embeddings=positions)
    assert Calibration("self").for_model(config).seq_len == length
    assert Calibration("self").for_model(config).facts()["seq_len"] == length
    assert Calibration("self", seq_len=100).for_model(config).seq_len == 100


def test_drawn_tokens_are_taken_as_they_are(text):
    ids = torch.arange(20).view(2, 10)
    again = Calibration(str(text), 2, 10, seed=3).drawn(ids)
    assert torch.equal(again.tokens(None, never), ids)
    assert again.facts() == Calibration(str(text), 2, 10, seed=3).facts()


def own_text(folder, samples=5, seq_len=24, seed=0):
    return draw_tokens(open_source(folder), Calibration("self", samples, seq_len, seed))


def test_own_text_is_the_same_each_time(llama):
    ids = own_text(llama)
    assert ids.shape == (5, 24) and ids.dtype == torch.int64
    assert (ids[:, 0] == 1).all()
    assert len(ids[:, 1].unique()) > 1
    assert torch.equal(own_text(llama), ids)
    assert not torch.equal(own_text(llama, seed=1), ids)
    torch.manual_seed(77)
    assert torch.equal(own_text(llama), ids)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox", "mixtral"])
def test_own_text_is_drawn_from_the_model_on_all_that_came_before(family, tmp_path):
    folder = tiny.save(family, tmp_path, num_hidden_layers=2)
    ids = own_text(folder, 3, 40)
    model = llmcompress.load(folder)
    generator = torch.Generator().manual_seed(0)
    found = torch.cat([torch.ones(3, 1).long(), torch.randint(tiny.VOCABULARY, (3, 1), generator=generator)], 1)
    with torch.no_grad():
        while found.shape[1] < 40:
            logits = model(input_ids=found, use_cache=False).logits[:, -1]
            found = torch.cat([found, torch.multinomial(logits.softmax(-1), 1, generator=generator)], 1)
    assert torch.equal(ids, found)


def test_own_text_comes_in_batches_of_bounded_size(llama, monkeypatch):
    monkeypatch.setattr(sample, "BATCH", 2)
    sizes = []
    real = sample._sample_batch
    monkeypatch.setattr(sample, "_sample_batch", lambda m, count, *rest: sizes.append(count) or real(m, count, *rest))
    assert own_text(llama).shape == (5, 24)
    assert sizes == [2, 2, 1]


def test_model_whose_output_is_not_finite_can_not_write(tmp_path):
    model = tiny.build("llama")
    with torch.no_grad():
        model.lm_head.weight.mul_(3e38)
        model.model.norm.weight.mul_(1e3)
    model.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    with pytest.raises(NumericalFailure, match="NaN or Inf.*--calibration"):
        own_text(tmp_path)


@pytest.fixture
def hub(monkeypatch):
    """The hub: endless data sets with a `text` and a `body` column; keeps how it was asked and how much was read."""
    seen = types.SimpleNamespace(asked=[], read=0)

    def rows():
        for i in itertools.count():
            seen.read += 1
            yield {"text": f"w{i % 50} w{i % 7} w{i % 11} w3", "body": "w9 w9 w9 w9"}

    def load_dataset(name, config=None, **given):
        seen.asked.append((name, config, given))
        return rows()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return seen


@pytest.mark.parametrize(
    ("source", "name", "config"),
    [
        ("c4", "allenai/c4", "en"),
        ("wikitext2", "Salesforce/wikitext", "wikitext-2-raw-v1"),
        ("some/thing", "some/thing", None),
        ("some/thing:small", "some/thing", "small"),
    ],
)
def test_hub_data_is_streamed_and_only_as_far_as_needed(source, name, config, hub):
    ids = draw(source, 6, 16)
    assert ids.shape == (6, 16)
    assert hub.asked == [(name, config, {"split": "train", "streaming": True})]
    assert hub.read == tokens.POOL * 6 * 16 // 4
    assert torch.equal(draw(source, 6, 16), ids)


def test_column_of_hub_data_can_be_named(hub):
    assert (draw("some/thing", text_field="body") == 4 + 9).all()
    with pytest.raises(BadInput, match="some/thing has no text under 'prose' .it has: text, body.*--text-field"):
        draw("some/thing", text_field="prose")


def test_hub_failure_is_one_sentence(monkeypatch):
    def load_dataset(*given, **named):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(BadInput, match="'c4' is no file here.*no route.; give a local .txt") as error:
        draw("c4")
    assert "\n" not in str(error.value)


def test_default_is_c4_where_the_hub_answers_and_the_model_itself_elsewhere(monkeypatch):
    assert tokens.default_source() == "self"
    monkeypatch.setattr(tokens, "hub_reachable", lambda: True)
    assert tokens.default_source() == "c4"
