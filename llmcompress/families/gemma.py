"""Gemma 2 and 3 (text): Llama's linears, two kinds of attention layers with arguments of their own."""

from dataclasses import replace

from llmcompress.families.llama import FAMILY as LLAMA

FAMILY = replace(LLAMA, name="gemma", model_types=("gemma", "gemma2", "gemma3_text"))
