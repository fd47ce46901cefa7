"""Mixtral: Llama's attention, experts fused in memory and one by one in checkpoints."""

from llmcompress.families import ExpertNames, Family
from llmcompress.families.llama import FAMILY as LLAMA

FAMILY = Family(
    name="mixtral",
    model_types=("mixtral",),
    layers="model.layers",
    groups=LLAMA.groups[:2],
    experts=ExpertNames(
        path="mlp.experts",
        gate="block_sparse_moe.experts.{e}.w1.weight",
        up="block_sparse_moe.experts.{e}.w3.weight",
        down="block_sparse_moe.experts.{e}.w2.weight",
        renames=(("mlp.gate.", "block_sparse_moe.gate."),),
    ),
)
