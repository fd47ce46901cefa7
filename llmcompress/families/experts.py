"""One linear per expert in place of the fused 3-D parameters of transformers 5."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn


class Routed(NamedTuple):
    """Input of one expert: rows x (tokens, features) and the token numbers they came from, ascending."""

    x: torch.Tensor
    tokens: torch.Tensor


class ExpertStage(nn.ModuleList):
    """The linears of all experts at one depth; called with one Routed per expert, gives one tensor each."""

    def forward(self, inputs: list[Routed]) -> list[torch.Tensor]:
        return [linear(routed.x) for linear, routed in zip(self, inputs, strict=True)]


class SplitExperts(nn.Module):
    """Same result as the fused experts module it replaces, with every expert's matrices as nn.Linear.

    gate_up: linears hidden_size -> 2 * intermediate_size; down: intermediate_size -> hidden_size.
    Parameters are created on the device of the fused ones (meta, in a skeleton).
    """

    def __init__(self, fused: nn.Module):
        super().__init__()
        count, double_width, hidden_size = fused.gate_up_proj.shape
        like = {"bias": False, "device": fused.gate_up_proj.device, "dtype": fused.gate_up_proj.dtype}
        self.gate_up = ExpertStage(nn.Linear(hidden_size, double_width, **like) for _ in range(count))
        self.down = ExpertStage(nn.Linear(double_width // 2, hidden_size, **like) for _ in range(count))
        self.act_fn = fused.act_fn

    def forward(self, hidden_states, top_k_index, top_k_weights):
        # hidden_states (tokens, hidden_size); top_k_index and top_k_weights (tokens, k)
        chosen = [torch.where(top_k_index == e) for e in range(len(self.gate_up))]
        inputs = [Routed(hidden_states[token], token) for token, _ in chosen]
        halves = [gate_up.chunk(2, dim=-1) for gate_up in self.gate_up(inputs)]
        inner = [Routed(self.act_fn(gate) * up, token) for (gate, up), (token, _) in zip(halves, chosen, strict=True)]
        total = torch.zeros_like(hidden_states)
        for out, (token, slot) in zip(self.down(inner), chosen, strict=True):
            total.index_add_(0, token, (out * top_k_weights[token, slot, None]).to(total.dtype))
        return total
