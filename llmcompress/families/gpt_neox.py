"""GPT-NeoX and Pythia: fused query-key-value, attention and FFN in parallel on most checkpoints."""

from llmcompress.families import Family

FAMILY = Family(
    name="gpt_neox",
    model_types=("gpt_neox",),
    layers="gpt_neox.layers",
    groups=(
        ("attention.query_key_value",),
        ("attention.dense",),
        ("mlp.dense_h_to_4h",),
        ("mlp.dense_4h_to_h",),
    ),
    renames=(("lm_head.", "embed_out."),),
    # A causal mask in bool, its -inf, and rotary frequencies: every Pythia on the hub has them.
    leftovers=(".attention.bias", ".attention.masked_bias", ".attention.rotary_emb.inv_freq"),
)
