"""Gradients of the whole model's loss with one decoder layer in memory.

Hidden states at every layer boundary are kept on disk; the layers are then walked backwards, each run again with
gradients on and fed the gradient that arrived from above.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from llmcompress.calibration.passes import calls_of, forward, through_layers
from llmcompress.checkpoint.skeleton import Skeleton
from llmcompress.errors import NumericalFailure
from llmcompress.evaluate.stream import final_logits


def streamed_gradients(
    skeleton: Skeleton,
    batches: list[torch.Tensor],
    work: Path,
    on_layer: Callable[[int, nn.Module, int], None],
    read_layer: Callable[[int], nn.Module] | None = None,
    last: int = 0,
    device: str = "cpu",
    in_memory: bool = False,
) -> float:
    """Walks the layers from the last to `last` with dLoss/dW of every parameter of each.

    skeleton: with all that stands outside the layers loaded, head included. batches: token ids (batch, seq_len).
    work: an empty folder for hidden states. Loss = mean next-token cross-entropy over all predicted tokens of all
    batches. on_layer(i, layer, b) is called after batch b has gone back through layer i: `parameter.grad` then holds
    the gradient summed over batches 0..b, float32 or the layer's dtype; set it to None to see one batch alone.
    read_layer(i): the layer to use, by default the source's. Returns the loss. Raises NumericalFailure naming the
    layer when a gradient is NaN or Inf.
    """
    read_layer = read_layer or (lambda i: skeleton.read_layer(i, device))
    count = len(skeleton.layers)
    calls = calls_of(skeleton, batches, device)
    *boundaries, boundary = through_layers(skeleton, batches, calls, work, read_layer, in_memory, device)
    predicted = sum(ids.shape[0] * (ids.shape[1] - 1) for ids in batches)
    loss = 0.0
    above = []
    for number, ids in enumerate(batches):
        hidden = boundary[number].to("cpu").detach().requires_grad_()
        with torch.enable_grad():
            logits = final_logits(skeleton, hidden)[:, :-1].float()
            part = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum") / predicted
        loss += float(part.detach())
        above.append(torch.autograd.grad(part, hidden)[0].to(device))
    boundary.remove()
    for i in reversed(range(last, count)):
        layer = read_layer(i).requires_grad_(True)
        for number, call in enumerate(calls):
            hidden = boundaries[i][number].detach().requires_grad_()
            with torch.enable_grad():
                forward(layer, hidden, call[i]).backward(above[number])
            above[number] = hidden.grad
            if not hidden.grad.isfinite().all():
                raise NumericalFailure(f"the loss gradient that reaches layer {i} from above holds NaN or Inf.")
            on_layer(i, layer, number)
        boundaries[i].remove()
    for boundary in boundaries[:last]:
        boundary.remove()
    return loss
