"""A model with no weights, whose decoder layers are filled from the source one at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from llmcompress.checkpoint.source import Source
from llmcompress.errors import BadInput
from llmcompress.families import Family, find

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class Piece(NamedTuple):
    """Rows of a parameter as a source keeps them: a whole tensor, or slice `index` of a 3-D one."""

    name: str
    index: int | None = None


@contextmanager
def meta_parameters():
    """Modules made inside get their parameters on the meta device and keep their buffers real.

    Buffers such as rotary frequencies are computed from the config and stand in no checkpoint.
    """
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


class Skeleton:
    """The empty model and the map from its parameters to the source's tensors.

    model: the causal LM, parameters on meta until asked for; family: its description;
    compute_dtype: dtype of layers and hidden states while it runs.
    Raises BadInput for models that are no supported decoder or whose tensors are missing.
    """

    def __init__(self, source: Source):
        from transformers import AutoModelForCausalLM

        self.source = source
        config = source.config
        source.check_decoder()
        if getattr(config, "quantization_config", None):
            raise BadInput(f"{source.name} is quantised; give the unquantised checkpoint.")
        self.family: Family = find(config.model_type)
        self.dtype = self._stored_dtype()
        # float16 overflows in the last layers of some models; its range is the reason, not its precision.
        self.compute_dtype = torch.float32 if self.dtype == torch.float16 else self.dtype
        with meta_parameters():
            self.model = AutoModelForCausalLM.from_config(config, dtype=self.compute_dtype)
        self.model.eval().requires_grad_(False)
        self.layers: nn.ModuleList = self.model.get_submodule(self.family.layers)
        if self.family.experts:
            self._split_experts()
        self.places = [self._layer_places(i) for i in range(len(self.layers))]
        beyond = self.layer_names(len(self.layers))
        if beyond:
            raise BadInput(
                f"{source.name} holds {beyond[0]}, but its config has {len(self.layers)} layers; fetch it again."
            )
        self.tied = bool(getattr(config, "tie_word_embeddings", False))
        # How a layer's output reaches the model, as the engine found out; None until it has.
        self.wrap_output: Callable[[torch.Tensor], Any] | None = None

    def _stored_dtype(self) -> torch.dtype:
        """The one dtype of all matrices of all decoder layers, read from the files' headers."""
        inside = self.family.layers.partition(".")[2] + "."
        examples: dict[str, str] = {}
        for name, (dtype, shape) in self.source.headers().items():
            if inside in name and len(shape) > 1 and not name.endswith(self.family.leftovers):
                examples.setdefault(dtype, name)
        if len(examples) > 1:
            several = ", ".join(f"{name} in {dtype}" for dtype, name in examples.items())
            raise BadInput(f"{self.source.name} mixes dtypes in its decoder layers ({several}); store it in one.")
        for dtype in examples:
            if dtype not in DTYPES:
                raise BadInput(f"{self.source.name} stores {dtype}; use float32, bfloat16 or float16 weights.")
        return DTYPES[next(iter(examples), "F32")]

    def _split_experts(self) -> None:
        from llmcompress.families.experts import SplitExperts

        path = self.family.experts.path
        for layer in self.layers:
            parent = layer.get_submodule(path.rpartition(".")[0])
            leaf = path.rpartition(".")[2]
            fused = getattr(parent, leaf, None)
            if fused is not None:
                setattr(parent, leaf, SplitExperts(fused))

    def _find(self, name: str) -> str | None:
        """The source's name of a model parameter: some checkpoints lack the base model's prefix."""
        bare = name.removeprefix(f"{self.model.base_model_prefix}.")
        candidates = [name, bare]
        candidates += [new + name.removeprefix(old) for old, new in self.family.renames if name.startswith(old)]
        return next((n for n in candidates if n in self.source.files), None)

    def _layer_places(self, i: int) -> dict[str, list[Piece]]:
        prefix = f"{self.family.layers}.{i}."
        places = {}
        for name, _ in self.layers[i].named_parameters():
            pieces = self._pieces(prefix, name)
            if pieces is None:
                raise BadInput(f"{self.source.name} lacks the tensor {prefix}{name}; fetch it again.")
            places[name] = pieces
        for name in self.layers[i].state_dict():
            found = self._find(prefix + name)
            if name not in places and found:
                places[name] = [Piece(found)]
        return places

    def _pieces(self, prefix: str, name: str) -> list[Piece] | None:
        experts = self.family.experts
        if experts and name.startswith(experts.path + "."):
            _, kind, number, _ = name.removeprefix(experts.path).split(".")
            fused = self._find(f"{prefix}{experts.path}.{kind}_proj")
            if fused:
                return [Piece(fused, int(number))]
            patterns = (experts.gate, experts.up) if kind == "gate_up" else (experts.down,)
            found = [self._find(prefix + pattern.format(e=number)) for pattern in patterns]
            return [Piece(n) for n in found] if all(found) else None
        found = self._find(prefix + name)
        if not found and experts:
            for module, stored in experts.renames:
                if name.startswith(module):
                    found = self._find(prefix + stored + name.removeprefix(module))
        return [Piece(found)] if found else None

    def layer_names(self, i: int) -> list[str]:
        """Names of all source tensors that belong to decoder layer i."""
        prefix = f"{self.family.layers}.{i}."
        bare = prefix.removeprefix(f"{self.model.base_model_prefix}.")
        return [name for name in self.source.files if name.startswith((prefix, bare))]

    def other_names(self) -> list[str]:
        """Names of all source tensors outside the decoder layers."""
        inside = {name for i in range(len(self.layers)) for name in self.layer_names(i)}
        return [name for name in self.source.files if name not in inside]

    def fill_layer(
        self, i: int, tensors: dict[str, torch.Tensor], device: str = "cpu", copies: bool = True
    ) -> nn.Module:
        """Decoder layer i as a module of its own, with the values of `tensors` in the compute dtype.

        copies False: shares the memory of `tensors` where dtype and device allow it, for a layer that is only read.
        """
        layer = copy.deepcopy(self.layers[i])
        state = {}
        for name, pieces in self.places[i].items():
            values = [tensors[p.name] if p.index is None else tensors[p.name][p.index] for p in pieces]
            value = values[0] if len(values) == 1 else torch.cat(values)
            expected = layer.get_parameter(name).shape if name in dict(layer.named_parameters()) else value.shape
            check_shape(pieces[0].name, value, expected)
            state[name] = value.to(device=device, dtype=self.compute_dtype, copy=copies)
        layer.load_state_dict(state, strict=False, assign=True)
        return layer.requires_grad_(False).to(device)

    def read_layer(self, i: int, device: str = "cpu") -> nn.Module:
        """Decoder layer i straight from the source."""
        return self.fill_layer(i, self.source.read(self.layer_names(i)), device)

    def store(self, i: int, name: str, value: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        """Writes parameter `name` of layer i into `tensors`, in the source's own layout and dtype, without -0.0."""
        start = 0
        for piece in self.places[i][name]:
            target = tensors[piece.name] if piece.index is None else tensors[piece.name][piece.index]
            rows = value[start : start + len(target)]
            target.copy_(rows.to(device=target.device, dtype=target.dtype) + 0.0)
            start += len(target)

    def fill_others(self, head: bool) -> None:
        """Loads what stands outside the decoder layers; the output head only when asked."""
        state, values = {}, {}
        table = getattr(self.model.get_output_embeddings(), "weight", None)
        outside = {
            name: parameter
            for name, parameter in self.model.named_parameters(remove_duplicate=False)
            if not name.startswith(self.family.layers + ".")
        }
        # A tied table may stand under either of its names, or under both, and then they need not even be equal.
        tied = [name for name, parameter in outside.items() if self.tied and parameter is table]
        for name, parameter in outside.items():
            if not head and parameter is table and not self.tied:
                continue
            names = [name, *tied] if name in tied else [name]
            found = next(filter(None, map(self._find, names)), None)
            if found is None:
                raise BadInput(f"{self.source.name} lacks the tensor {name}; fetch it again.")
            if found not in values:
                # Mapped, not copied: of a large vocabulary's table only the rows that are looked up become resident.
                value = self.source.map(found)
                check_shape(found, value, parameter.shape)
                values[found] = nn.Parameter(value.to(self.compute_dtype), requires_grad=False)
            state[name] = values[found]
        self.model.load_state_dict(state, strict=False, assign=True)


def check_shape(name: str, value: torch.Tensor, expected: torch.Size) -> None:
    if value.shape != expected:
        raise BadInput(f"tensor {name} has shape {tuple(value.shape)}, the config asks for {tuple(expected)}.")
