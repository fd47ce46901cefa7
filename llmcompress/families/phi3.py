"""Phi-3: query, key and value in one matrix, gate and up in another."""

from llmcompress.families import Family

FAMILY = Family(
    name="phi3",
    model_types=("phi3",),
    layers="model.layers",
    groups=(("self_attn.qkv_proj",), ("self_attn.o_proj",), ("mlp.gate_up_proj",), ("mlp.down_proj",)),
)
