"""Llama and the models that kept its layer: Mistral, Qwen2, Qwen3, SmolLM."""

from llmcompress.families import Family

FAMILY = Family(
    name="llama",
    model_types=("llama", "mistral", "qwen2", "qwen3", "smollm3"),
    layers="model.layers",
    groups=(
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("self_attn.o_proj",),
        ("mlp.gate_proj", "mlp.up_proj"),
        ("mlp.down_proj",),
    ),
)
