"""Plain forward passes of a whole model with one decoder layer in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from llmcompress.calibration import engine
from llmcompress.calibration.states import States
from llmcompress.checkpoint.skeleton import Skeleton


def calls_of(skeleton: Skeleton, batches: list[torch.Tensor], device: str = "cpu") -> list[list[engine.Call]]:
    """For every batch what each layer is called with beside its hidden states; batches of one shape share it."""
    shapes = {tuple(ids.shape): ids for ids in batches}
    by_shape = engine.to_device(engine.record(skeleton, shapes.values(), lambda hidden: None), device)
    return [by_shape[tuple(ids.shape)] for ids in batches]


@torch.no_grad()
def through_layers(
    skeleton: Skeleton,
    batches: list[torch.Tensor],
    calls: list[list[engine.Call]],
    work: Path,
    read_layer: Callable[[int], nn.Module],
    in_memory: bool = False,
    device: str = "cpu",
) -> Iterator[States]:
    """The hidden states in front of every layer and, last, after all of them; each may be removed once it was used."""
    boundary = States(work / "00000", in_memory, device, "that enter layer 0")
    engine.record(skeleton, batches, lambda hidden: boundary.append(hidden.to(device)))
    yield boundary
    for i in range(len(skeleton.layers)):
        layer = read_layer(i)
        after = States(work / f"{i + 1:05d}", in_memory, device, f"after layer {i}")
        for number, call in enumerate(calls):
            after.append(forward(layer, boundary[number], call[i]))
        boundary = after
        yield boundary


def forward(layer: nn.Module, hidden: torch.Tensor, call: engine.Call) -> torch.Tensor:
    """One decoder layer on one batch, (batch, seq_len, hidden_size)."""
    args, kwargs = call
    return engine.first_tensor(layer(hidden, *args, **kwargs))
