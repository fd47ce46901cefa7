"""Perplexity by the standard protocol: one token stream, windows that don't overlap, mean over predicted tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from llmcompress.calibration.passes import calls_of, through_layers
from llmcompress.calibration.tokens import SEQ_LEN, check_vocabulary
from llmcompress.checkpoint.load import load
from llmcompress.checkpoint.skeleton import Skeleton
from llmcompress.checkpoint.source import Source, open_source
from llmcompress.device import pick_device
from llmcompress.errors import BadInput, NumericalFailure
from llmcompress.evaluate.stream import final_logits


@dataclass(frozen=True)
class Perplexity:
    """value over `windows` windows of `seq_len` tokens of `source`, in each of which seq_len - 1 are predicted."""

    value: float
    source: str
    seq_len: int
    windows: int


def window_tokens(source: str, tokenizer, seq_len: int, max_windows: int | None = None) -> torch.Tensor:
    """Token ids, int64 (windows, seq_len), of a text file or `wikitext2`. Raises BadInput.

    The whole text is one string, tokenised once with the tokenizer's own special tokens; a last part shorter than
    seq_len is left out.
    """
    text = read_text(source)
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.long)
    count = len(ids) // seq_len
    if count == 0:
        raise BadInput(f"{source} holds {len(ids)} tokens, fewer than one window of {seq_len}; lower --seq-len.")
    return ids[: count * seq_len].view(count, seq_len)[:max_windows]


def read_text(source: str) -> str:
    path = Path(source)
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise BadInput(f"{source} is not UTF-8 text ({error}); convert it.") from error
    if source != "wikitext2":
        raise BadInput(f"--perplexity {source}: no such file; give a text file or wikitext2.")
    import datasets

    try:
        rows = datasets.load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1", split="test")
    except Exception as error:  # datasets raises many unrelated types for "not there" and "no network"
        raise BadInput(
            f"wikitext2 can't be fetched from the hub ({type(error).__name__}); give a text file."
        ) from error
    return "\n\n".join(rows["text"])


@torch.no_grad()
def perplexity(
    model, windows: torch.Tensor, source: str = "", on_window: Callable[[int, int], None] = lambda done, total: None
) -> Perplexity:
    """exp of the mean next-token cross-entropy, float32, of `windows` (count, seq_len) under a causal LM.

    Raises NumericalFailure.
    """
    device = next(model.parameters()).device

    def losses() -> Iterator[float]:
        for window in windows:
            ids = window[None].to(device)
            yield loss_sum(model(input_ids=ids, use_cache=False).logits, ids)

    return from_losses(losses(), windows, source, on_window)


@torch.no_grad()
def streamed_perplexity(
    skeleton: Skeleton, windows: torch.Tensor, source: str, work: Path, device: str = "cpu", in_memory: bool = False
) -> Perplexity:
    """The same with one decoder layer in memory; hidden states go to the empty folder `work`.

    skeleton: with all that stands outside the layers loaded, head included.
    """
    batches = list(windows.split(1))
    calls = calls_of(skeleton, batches[:1], device) * len(batches)
    read = lambda i: skeleton.read_layer(i, device)  # noqa: E731
    last = None
    for boundary in through_layers(skeleton, batches, calls, work, read, in_memory, device):
        if last is not None:
            last.remove()
        last = boundary
    losses = (loss_sum(final_logits(skeleton, last[i].cpu()), ids) for i, ids in enumerate(batches))
    result = from_losses(losses, windows, source, lambda done, total: None)
    last.remove()
    return result


def loss_sum(logits: torch.Tensor, ids: torch.Tensor) -> float:
    """Sum of the next-token cross-entropies of logits (1, seq_len, vocabulary) in float32."""
    return float(F.cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="sum"))


def from_losses(losses: Iterable[float], windows: torch.Tensor, source: str, on_window) -> Perplexity:
    total = 0.0
    for number, loss in enumerate(losses):
        total += loss
        on_window(number + 1, len(windows))
    if not math.isfinite(total):
        raise NumericalFailure(f"the model's output on {source or 'the text'} holds NaN or Inf: it has no perplexity.")
    mean = total / (windows.shape[0] * (windows.shape[1] - 1))
    value = math.exp(mean) if mean < 700 else math.inf
    return Perplexity(value, source, windows.shape[1], len(windows))


def evaluate_perplexity(
    model: str, source: str, seq_len: int | None, max_windows: int | None, device: str, trust_remote_code: bool,
    on_event: Callable[[str, dict], None] = lambda kind, data: None,
) -> Perplexity:  # fmt: skip
    """Perplexity of the checkpoint `model` on a text file or `wikitext2`. Raises BadInput or NumericalFailure.

    seq_len: window length; default 2048, or the model's maximum if that is less.
    """
    opened = open_source(model, trust_remote_code)
    windows = windows_for(opened, source, seq_len, max_windows)
    loaded = load(opened.folder, pick_device(device), trust_remote_code)
    return perplexity(loaded, windows, source, lambda done, total: on_event("evaluate", {"done": done, "total": total}))


def windows_for(opened: Source, source: str, seq_len: int | None, max_windows: int | None) -> torch.Tensor:
    """`window_tokens` of a length that suits the model. Raises BadInput."""
    longest = getattr(opened.config, "max_position_embeddings", None)
    if seq_len is None:
        seq_len = min(SEQ_LEN, longest or SEQ_LEN)
    if seq_len < 2 or (longest and seq_len > longest):
        raise BadInput(f"--seq-len {seq_len}: use 2 to {longest or 'any number of'} tokens for this model.")
    windows = window_tokens(source, opened.tokenizer(), seq_len, max_windows)
    check_vocabulary(windows, opened.config, opened.name)
    return windows
