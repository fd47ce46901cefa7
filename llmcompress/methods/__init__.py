"""Pruning methods. One file each; a new one is that file and one line in `MODULES`.

A method module has a docstring whose first line describes it, `Options` (a frozen dataclass: field = command line
option = report key, help text in the field's metadata), `NEEDS` (the statistics it wants, empty for a data-free
method), `ERROR_CORRECTION` (its default), and
    prune(weights, stats, pattern, options, clock) -> weights
    workspace(rows, columns, pattern, options) -> how many float32 values `prune` holds beside weights and result
on the matrices {name: (m, n) float32} of one group of linears that share an input; `prune` may use up `stats`.
Modules import torch only inside functions, so that listing methods is instant.
"""

from __future__ import annotations

import dataclasses
import difflib
from importlib import import_module
from types import ModuleType
from typing import Any

from llmcompress.errors import BadInput

MODULES = {
    "fista": "llmcompress.methods.fista",
    "sparsegpt": "llmcompress.methods.sparsegpt",
    "wanda": "llmcompress.methods.wanda",
    "magnitude": "llmcompress.methods.magnitude",
}


def find(name: str) -> ModuleType:
    """The module of a method. Raises BadInput naming the nearest."""
    if name in MODULES:
        return import_module(MODULES[name])
    near = difflib.get_close_matches(name, MODULES, n=1)
    hint = f", did you mean {near[0]}?" if near else ";"
    raise BadInput(f"unknown method {name!r}{hint} methods: {', '.join(MODULES)}.")


def make_options(method: str, given: dict[str, Any]) -> Any:
    """The method's Options with the given fields set. Raises BadInput for a field it lacks or a bad value."""
    options = find(method).Options
    known = {field.name: field for field in dataclasses.fields(options)}
    for name in given:
        if name not in known:
            owners = [m for m in MODULES if any(f.name == name for f in dataclasses.fields(find(m).Options))]
            whose = f"it belongs to {', '.join(owners)}" if owners else "no method has it"
            raise BadInput(f"--{name.replace('_', '-')} is no option of {method}; {whose}.")
    return options(**given)


def option(default: Any, help: str, **metadata: Any) -> Any:
    """A field of an Options dataclass; metadata `choices` or `least` and `most` are checked by `validate`."""
    return dataclasses.field(default=default, metadata={"help": help, **metadata})


def validate(options: Any) -> None:
    """Checks every field against its metadata. Raises BadInput naming the option and what it accepts."""
    for field in dataclasses.fields(options):
        value, meta = getattr(options, field.name), field.metadata
        flag = f"--{field.name.replace('_', '-')} {value}"
        if "choices" in meta and value not in meta["choices"]:
            raise BadInput(f"{flag}: use one of {', '.join(meta['choices'])}.")
        if "least" in meta and not meta["least"] <= value <= meta["most"]:
            raise BadInput(f"{flag}: use {meta['least']:g} to {meta['most']:g}.")
