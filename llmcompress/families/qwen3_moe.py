"""Qwen3-MoE: Qwen3's attention; a layer is either a mixture of experts or, where the config says so, dense."""

from dataclasses import replace

from llmcompress.families import ExpertNames
from llmcompress.families.llama import FAMILY as LLAMA

FAMILY = replace(
    LLAMA,
    name="qwen3_moe",
    model_types=("qwen3_moe",),
    experts=ExpertNames(
        path="mlp.experts",
        gate="mlp.experts.{e}.gate_proj.weight",
        up="mlp.experts.{e}.up_proj.weight",
        down="mlp.experts.{e}.down_proj.weight",
    ),
)
