"""Model families: where the decoder layers are and which linears share an input. One short file each.

To add a family, write `families/NAME.py` with a `FAMILY` and name it in `MODULES`.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cache
from importlib import import_module

from llmcompress.errors import BadInput

MODULES = ("llama", "opt", "gemma", "phi3", "gpt_neox", "mixtral", "qwen3_moe")


@dataclass(frozen=True)
class ExpertNames:
    """Where a mixture-of-experts layer keeps its experts.

    path: the module that transformers holds as fused 3-D parameters, inside a decoder layer.
    gate, up, down: names of one expert's matrices in a checkpoint, inside a decoder layer, `{e}` its number.
    renames: other (module prefix, checkpoint prefix) pairs inside a decoder layer.
    """

    path: str
    gate: str
    up: str
    down: str
    renames: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Family:
    """A family of decoder models.

    model_types: values of `config.model_type` it serves.
    layers: path of the list of decoder layers inside the causal language model.
    groups: linears inside a decoder layer that share one input; those a layer lacks are passed over.
    renames: (module prefix, checkpoint prefix) pairs outside the decoder layers, where the two differ.
    leftovers: ends of names of tensors that old checkpoints hold and the model no longer reads; they are copied.
    """

    name: str
    model_types: tuple[str, ...]
    layers: str
    groups: tuple[tuple[str, ...], ...]
    experts: ExpertNames | None = None
    renames: tuple[tuple[str, str], ...] = ()
    leftovers: tuple[str, ...] = ()


@cache
def all_families() -> tuple[Family, ...]:
    return tuple(import_module(f"{__name__}.{module}").FAMILY for module in MODULES)


def find(model_type: str) -> Family:
    """The family that serves `config.model_type`. Raises BadInput naming what is supported."""
    by_type = {t: family for family in all_families() for t in family.model_types}
    if model_type in by_type:
        return by_type[model_type]
    near = difflib.get_close_matches(model_type, by_type, n=1)
    hint = f" (nearest: {near[0]})" if near else ""
    raise BadInput(
        f"model type {model_type!r} is not a supported decoder family{hint}; supported: "
        f"{', '.join(sorted(by_type))}; a new one is one file like families/llama.py."
    )
