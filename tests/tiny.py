"""Tiny random models of every family, with a tokenizer and a text that suit them."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

VOCABULARY = 128
BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
NO_GQA = {k: v for k, v in BASE.items() if k != "num_key_value_heads"}
WINDOWED = {"sliding_window": 16, "head_dim": 8, "num_hidden_layers": 7}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}

CONFIGS = {
    "llama": lambda **over: LlamaConfig(**BASE | over),
    "mistral": lambda **over: MistralConfig(**BASE | {"sliding_window": 16} | over),
    "qwen2": lambda **over: Qwen2Config(**BASE | {"tie_word_embeddings": True} | over),
    "qwen3": lambda **over: Qwen3Config(**BASE | {"head_dim": 16} | over),
    "smollm3": lambda **over: SmolLM3Config(**BASE | {"no_rope_layer_interval": 2} | over),
    "opt": lambda **over: OPTConfig(
        **{k: v for k, v in NO_GQA.items() if k != "intermediate_size"}
        | {"ffn_dim": 48, "word_embed_proj_dim": 32, "do_layer_norm_before": True}
        | over
    ),  # fmt: skip
    "gemma": lambda **over: GemmaConfig(**BASE | {"head_dim": 16} | over),
    "gemma2": lambda **over: Gemma2Config(**BASE | WINDOWED | over),
    "gemma3_text": lambda **over: Gemma3TextConfig(**BASE | WINDOWED | over),
    "phi3": lambda **over: Phi3Config(**BASE | over),
    "gpt_neox": lambda **over: GPTNeoXConfig(**NO_GQA | {"rotary_pct": 0.5} | over),
    "mixtral": lambda **over: MixtralConfig(**BASE | MOE | over),
    "qwen3_moe": lambda **over: Qwen3MoeConfig(
        **BASE | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8} | over
    ),
}


def build(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **over):
    """A random causal LM whose weights are large enough for layers to change what goes through."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[family](**over), dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.1)
            else:
                # Biases and norms of their own, so that a lost one shows.
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def save(family: str, folder: Path, dtype: torch.dtype = torch.float32, seed: int = 0, **over) -> Path:
    """Writes the model of `build` and a tokenizer; returns the folder."""
    build(family, dtype, seed, **over).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return Path(folder)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor in the files of a checkpoint."""
    tensors = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def restore(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Makes `tensors` all that the single file of a checkpoint holds; returns the folder."""
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def words() -> list[str]:
    return ["<pad>", "<s>", "</s>", "<unk>"] + [f"w{i}" for i in range(VOCABULARY - 4)]


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word; no token is put in front."""
    model = Tokenizer(WordLevel({word: i for i, word in enumerate(words())}, unk_token="<unk>"))
    model.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=model, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )


def write_text(path: Path, tokens: int = 6000, seed: int = 0) -> Path:
    """A text in which each word makes some next words likely."""
    draw = random.Random(seed)
    names = words()[4:]
    word, line, lines = 0, [], []
    for _ in range(tokens):
        word = (word * 7 + draw.choice((1, 2, 3, 5))) % len(names)
        line.append(names[word])
        if len(line) == 20:
            lines.append(" ".join(line))
            line = []
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
