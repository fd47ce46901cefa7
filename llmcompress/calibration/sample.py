"""Text that the model writes itself, for calibration without data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from llmcompress.calibration.tokens import Calibration
    from llmcompress.checkpoint.source import Source

BATCH = 32


@torch.no_grad()
def sample_from(source: Source, calibration: Calibration, device: str = "cpu") -> torch.Tensor:
    """Token ids, int64 (samples, seq_len), drawn from the model at temperature 1.

    Each sample starts with a random token, so that they differ from the start (as in LLM-QAT, arXiv 2305.17888).
    Holds the whole model in memory.
    """
    from llmcompress.checkpoint.load import load

    model = load(source.folder, device=device, trust_remote_code=source.trust_remote_code)
    generator = torch.Generator(device=device).manual_seed(calibration.seed)
    done = []
    for start in range(0, calibration.samples, BATCH):
        count = min(BATCH, calibration.samples - start)
        done.append(_sample_batch(model, count, calibration.seq_len, generator))
    return torch.cat(done).cpu()


def _sample_batch(model, count: int, seq_len: int, generator: torch.Generator) -> torch.Tensor:
    config = model.config
    ids = torch.randint(config.vocab_size, (count, 1), generator=generator, device=generator.device)
    if config.bos_token_id is not None:
        ids = torch.cat([torch.full_like(ids, config.bos_token_id), ids], dim=1)
    step, past = ids, None
    while ids.shape[1] < seq_len:
        out = model(input_ids=step, past_key_values=past, use_cache=True)
        past = out.past_key_values
        step = torch.multinomial(out.logits[:, -1].float().softmax(-1), 1, generator=generator)
        ids = torch.cat([ids, step], dim=1)
    return ids[:, :seq_len]
