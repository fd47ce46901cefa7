"""Streamed gradients equal those of the whole model."""

import pytest
import tiny
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from llmcompress.calibration.gradients import streamed_gradients
from llmcompress.checkpoint.skeleton import Skeleton
from llmcompress.checkpoint.source import open_source


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("family", ["llama", "opt", "gemma3_text", "mixtral"])
def test_equal_to_backward_on_the_whole_model(family, in_memory, tmp_path):
    folder = tiny.save(family, tmp_path / "model")
    batches = list(torch.randint(3, tiny.VOCABULARY, (5, 24), generator=torch.Generator().manual_seed(1)).split(2))
    model = AutoModelForCausalLM.from_pretrained(folder)
    losses = [
        F.cross_entropy(model(b).logits[:, :-1].flatten(0, 1), b[:, 1:].flatten(), reduction="sum") for b in batches
    ]
    loss = sum(losses) / (5 * 23)
    loss.backward()
    skeleton = Skeleton(open_source(folder))
    skeleton.fill_others(head=True)
    found, order = {}, []

    def on_layer(i, layer, number):
        order.append((i, number))
        found[i] = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}

    streamed = streamed_gradients(skeleton, batches, tmp_path / "work", on_layer, in_memory=in_memory)
    assert streamed == pytest.approx(loss.item(), rel=1e-5)
    count = len(skeleton.layers)
    assert order == [(i, number) for i in reversed(range(count)) for number in range(3)]
    whole = model.get_submodule(skeleton.family.layers)
    for i in range(count):
        for name, parameter in whole[i].named_parameters():
            if name in found[i]:
                distance = (found[i][name] - parameter.grad).norm() / parameter.grad.norm()
                assert distance < 1e-5, (i, name)
        if family != "mixtral":
            assert set(found[i]) == {name for name, _ in whole[i].named_parameters()}
    assert not any((tmp_path / "work").iterdir())


def test_stops_at_the_last_layer_that_is_asked_for(tmp_path, llama):
    skeleton = Skeleton(open_source(llama))
    skeleton.fill_others(head=True)
    seen = []
    ids = torch.ones(1, 8, dtype=torch.long)
    streamed_gradients(skeleton, [ids], tmp_path, lambda i, layer, number: seen.append(i), last=1)
    assert seen == [2, 1]
