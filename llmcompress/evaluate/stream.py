"""A forward pass with one decoder layer in memory."""

from __future__ import annotations

import torch
from torch import nn

from llmcompress.calibration import engine
from llmcompress.checkpoint.skeleton import Skeleton


class Forward:
    """Token ids on their way through a model whose layers come one by one.

    skeleton: with all that is outside the layers loaded; ids: (batch, seq_len) int64.
    """

    @torch.no_grad()
    def __init__(self, skeleton: Skeleton, ids: torch.Tensor):
        self.skeleton = skeleton
        self.ids = ids
        entering: list[torch.Tensor] = []
        self.calls = engine.record(skeleton, [ids], entering.append)[tuple(ids.shape)]
        (self.hidden,) = entering

    @torch.no_grad()
    def through(self, i: int, layer: nn.Module) -> None:
        """Takes the hidden states through decoder layer i."""
        device = next(layer.parameters()).device
        args, kwargs = engine.to_device(self.calls[i], device)
        self.hidden = engine.first_tensor(layer(self.hidden.to(device), *args, **kwargs))

    @torch.no_grad()
    def logits(self) -> torch.Tensor:
        """(batch, seq_len, vocabulary), after the last layer."""
        return final_logits(self.skeleton, self.hidden.cpu())

    def distance(self, dense: Forward) -> float:
        """Relative Frobenius distance of the hidden states to those of `dense`."""
        other = dense.hidden.float()
        return float((self.hidden.float() - other).norm() / other.norm().clamp(min=1e-30))


def final_logits(skeleton: Skeleton, hidden: torch.Tensor) -> torch.Tensor:
    """What the model makes of the last layer's hidden states (batch, seq_len, hidden_size)."""
    ids = torch.zeros(hidden.shape[:2], dtype=torch.long)
    with engine.layers_replaced(skeleton, ids, lambda hidden_states, args, kwargs: hidden):
        return skeleton.model(input_ids=ids, use_cache=False).logits
