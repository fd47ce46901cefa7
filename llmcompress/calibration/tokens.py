"""Calibration tokens: packed blocks of equal length from a file, a hub data set or the model itself."""

from __future__ import annotations

import hashlib
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmcompress.errors import BadInput

if TYPE_CHECKING:
    import torch

HUB = {
    "c4": ("allenai/c4", "en", "train", "text"),
    "wikitext2": ("Salesforce/wikitext", "wikitext-2-raw-v1", "train", "text"),
}
# Blocks are drawn from a pool this many times larger than asked, so that a huge source is not read whole.
POOL = 32
PIECE = 100_000
# The field's habit; a model's maximum can be a hundred times longer and would never be filled.
SEQ_LEN = 2048


@dataclass(frozen=True)
class Calibration:
    """What to calibrate on.

    source: a .txt, .jsonl or .parquet file, `c4`, `wikitext2`, a hub data set `OWNER/NAME[:config]`, or `self`.
    samples: blocks of seq_len tokens (default: 2048, or the model's maximum if that is less), no padding, so that
    nothing but text enters the statistics.
    text_field: the column that holds the text of a .jsonl, .parquet or hub row.
    ids: the tokens themselves, int64 (samples, seq_len), when they have been drawn already; see `drawn`.
    """

    source: str
    samples: int = 128
    seq_len: int | None = None
    seed: int = 0
    text_field: str = "text"
    ids: torch.Tensor | None = field(default=None, repr=False, compare=False)

    def __post_init__(self):
        for name, least in (("samples", 1), ("seq_len", 8)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise BadInput(f"--{name.replace('_', '-')} {value} is too small; use {least} or more.")
        if not 0 <= self.seed < 2**63:
            raise BadInput(f"--seed {self.seed}: use 0 to 2**63 - 1.")

    def for_model(self, config) -> Calibration:
        """With the sequence length that suits a model. Raises BadInput when it has fewer positions than asked."""
        longest = getattr(config, "max_position_embeddings", None)
        if self.seq_len is None:
            return replace(self, seq_len=min(SEQ_LEN, longest or SEQ_LEN))
        if longest and self.seq_len > longest:
            raise BadInput(f"--seq-len {self.seq_len} is longer than the model's {longest} positions.")
        return self

    def tokens(self, tokenizer, sample: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Token ids, int64 (samples, seq_len). `sample` gives them for `self`. Raises BadInput."""
        if self.ids is not None:
            return self.ids
        if self.source == "self":
            return sample()
        import torch

        # A model that was trained with a first token misbehaves on blocks that start without it.
        first = [tokenizer.bos_token_id] if starts_with_bos(tokenizer) else []
        length = self.seq_len - len(first)
        wanted = self.samples * length
        ids: list[int] = []
        for document in documents(self.source, self.text_field):
            ids += tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
            if len(ids) >= POOL * wanted:
                break
        if len(ids) < wanted:
            raise BadInput(
                f"calibration {self.source} holds {len(ids)} tokens; {self.samples} samples of {self.seq_len} need "
                f"{wanted}: give more text, or lower --samples or --seq-len."
            )
        blocks = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
        order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(self.seed))
        chosen = blocks[order[: self.samples]]
        return torch.cat([torch.tensor(first).long().expand(len(chosen), -1), chosen], dim=1)

    def drawn(self, ids: torch.Tensor) -> Calibration:
        """The same calibration with its tokens at hand, for several runs on one draw."""
        return replace(self, ids=ids)

    def facts(self) -> dict[str, str | int]:
        """Settings for a report."""
        return {name: getattr(self, name) for name in ("source", "samples", "seq_len", "seed", "text_field")}


def starts_with_bos(tokenizer) -> bool:
    ids = tokenizer("a", verbose=False)["input_ids"]
    return tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]


def check_vocabulary(tokens: torch.Tensor, config, name: str) -> None:
    """Raises BadInput when a tokenizer knows tokens that its model lacks."""
    size = getattr(config, "vocab_size", None)
    if size and int(tokens.max()) >= size:
        raise BadInput(
            f"{name}: its tokenizer gives token {int(tokens.max())} and its model has {size}; they don't belong "
            "together."
        )


def fingerprint(tokens: torch.Tensor) -> str:
    """sha256 of the token ids."""
    return hashlib.sha256(tokens.contiguous().numpy().tobytes()).hexdigest()


def documents(source: str, text_field: str) -> Iterator[str]:
    """Texts of a source, in order, read as they are asked for. Raises BadInput."""
    path = Path(source)
    if path.suffix in (".txt", ".jsonl", ".parquet") or path.exists():
        if not path.is_file():
            raise BadInput(f"calibration {source} is no file; give a .txt, .jsonl or .parquet file.")
        readers = {".txt": text_pieces, ".jsonl": json_lines, ".parquet": parquet_rows}
        if path.suffix not in readers:
            raise BadInput(f"calibration file {source} must end in .txt, .jsonl or .parquet.")
        return readers[path.suffix](path, text_field)
    return hub_rows(source, text_field)


def text_pieces(path: Path, text_field: str) -> Iterator[str]:
    """The file in pieces of whole lines: tokenizers slow down on one string of many megabytes."""
    piece: list[str] = []
    size = 0
    for line in lines(path):
        piece.append(line)
        size += len(line)
        if size >= PIECE:
            yield "".join(piece)
            piece, size = [], 0
    if piece:
        yield "".join(piece)


def lines(path: Path) -> Iterator[str]:
    try:
        with open(path, encoding="utf-8") as file:
            yield from file
    except UnicodeDecodeError as error:
        raise BadInput(f"calibration file {path} is not UTF-8 text ({error}); convert it.") from error
    except OSError as error:
        raise BadInput(f"calibration file {path} can't be read: {error.strerror}.") from error


def field_of(row: object, text_field: str, where: str) -> str:
    value = row.get(text_field) if isinstance(row, dict) else None
    if not isinstance(value, str):
        has = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise BadInput(f"{where} has no text under {text_field!r} (it has: {has}); name the column with --text-field.")
    return value


def json_lines(path: Path, text_field: str) -> Iterator[str]:
    for number, line in enumerate(lines(path), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise BadInput(f"{path} line {number} is not JSON: {error}.") from error
        yield field_of(row, text_field, f"{path} line {number}")


def parquet_rows(path: Path, text_field: str) -> Iterator[str]:
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        for batch in file.iter_batches(batch_size=64):
            for row in batch.to_pylist():
                yield field_of(row, text_field, str(path))
    except pyarrow.ArrowInvalid as error:
        raise BadInput(f"{path} is not a parquet file: {error}.") from error


def hub_rows(source: str, text_field: str) -> Iterator[str]:
    """Rows of a hub data set, streamed."""
    import datasets

    name, _, config = source.partition(":")
    name, config, split, field = HUB.get(source, (name, config or None, "train", text_field))
    try:
        for row in datasets.load_dataset(name, config, split=split, streaming=True):
            yield field_of(row, field, source)
    except BadInput:
        raise
    except Exception as error:  # datasets raises many unrelated types for "not there" and "no network"
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BadInput(
            f"calibration {source!r} is no file here and can't be streamed from the hub ({reason}); give a local "
            ".txt, .jsonl or .parquet file, or 'self'."
        ) from error


def hub_reachable() -> bool:
    """Whether the hub answers within three seconds; never tried when HF_HUB_OFFLINE is set."""
    import huggingface_hub.constants as hub

    if hub.HF_HUB_OFFLINE:
        return False
    request = urllib.request.Request(hub.ENDPOINT, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=3):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


def default_source() -> str:
    """c4, the field's habit, when it can be streamed; else text from the model itself."""
    return "c4" if hub_reachable() else "self"
