"""OPT: biases everywhere, learned positions, a plain two-layer FFN."""

from llmcompress.families import Family

FAMILY = Family(
    name="opt",
    model_types=("opt",),
    layers="model.decoder.layers",
    groups=(
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("self_attn.out_proj",),
        ("fc1",),
        ("fc2",),
    ),
)
