"""Text that the model writes itself, for calibration without data."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import torch

from llmcompress.errors import NumericalFailure

if TYPE_CHECKING:
    from llmcompress.calibration.tokens import Calibration
    from llmcompress.checkpoint.source import Source

BATCH = 32


@torch.no_grad()
def sample_from(source: Source, calibration: Calibration, device: str = "cpu") -> torch.Tensor:
    """Token ids, int64 (samples, seq_len), drawn from the model at temperature 1.

    Each sample starts with a random token, so that they differ from the start (as in LLM-QAT, arXiv 2305.17888).
    Holds the whole model in memory. Raises BadInput or NumericalFailure when its numbers are not finite.
    """
    from llmcompress.checkpoint.load import load

    source.check()
    model = load(source.folder, device=device, trust_remote_code=source.trust_remote_code)
    generator = torch.Generator(device=device).manual_seed(calibration.seed)
    done = []
    for start in range(0, calibration.samples, BATCH):
        count = min(BATCH, calibration.samples - start)
        done.append(_sample_batch(model, count, calibration.seq_len, generator))
    return torch.cat(done).cpu()


def _sample_batch(model, count: int, seq_len: int, generator: torch.Generator) -> torch.Tensor:
    from transformers import DynamicCache

    config = model.config
    cache = DynamicCache(config=config)
    # Renamed in transformers 5.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    ids = torch.randint(config.vocab_size, (count, 1), generator=generator, device=generator.device)
    if config.bos_token_id is not None:
        ids = torch.cat([torch.full_like(ids, config.bos_token_id), ids], dim=1)
    step = ids
    while ids.shape[1] < seq_len:
        logits = model(input_ids=step, use_cache=True, **{name: cache}).logits[:, -1].float()
        if not logits.isfinite().all():
            raise NumericalFailure(
                "the model's own output holds NaN or Inf, so that it can't write its calibration text; give a file "
                "with --calibration."
            )
        step = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        ids = torch.cat([ids, step], dim=1)
    return ids[:, :seq_len]
