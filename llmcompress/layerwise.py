"""One decoder layer at a time: from the source's tensors to compressed ones, with what was measured on the way."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from llmcompress import methods
from llmcompress.calibration import engine
from llmcompress.checkpoint.skeleton import Skeleton
from llmcompress.clock import Clock
from llmcompress.errors import BadInput, NumericalFailure
from llmcompress.sparsity import Pattern

ERROR_CORRECTIONS = ("layer", "sequential", "model", "off")
# An expert with fewer tokens than this share of its input width has no statistics worth solving on.
STARVED = 1 / 16


@dataclass(frozen=True)
class Work:
    """What is to be done to every layer; small and picklable, so that another process can do the same."""

    method: str
    options: Any
    pattern: Pattern
    error_correction: str
    targets: tuple[str, ...]

    @property
    def compares(self) -> bool:
        """Whether a dense copy of each layer runs beside the compressed one."""
        return bool(self.needs) and self.error_correction != "off"

    @property
    def needs(self) -> frozenset[str]:
        return methods.find(self.method).NEEDS


def choose_targets(skeleton: Skeleton, work: Work) -> list[set[str]]:
    """Names of the linears to prune, per layer. Raises BadInput for a width the pattern can't take."""
    family = skeleton.family
    for target in work.targets:
        if any(word in target for word in ("lm_head", "embed", "wte")):
            tied = "tied to each other" if skeleton.tied else "not decoder layers"
            raise BadInput(
                f"target {target!r}: embeddings and lm_head are {tied} and are never pruned; name linears inside "
                "decoder layers, such as 'mlp.*'."
            )
    chosen = []
    unused = set(work.targets)
    for i, layer in enumerate(skeleton.layers):
        linears = linears_of(skeleton, layer)
        unused -= {t for t in unused if any(targeted(family.layers, i, name, (t,)) for name in linears)}
        names = {name for name in linears if targeted(family.layers, i, name, work.targets)}
        for name in sorted(names):
            misfit = work.pattern.misfit(linears[name].in_features)
            if misfit:
                raise BadInput(f"{family.layers}.{i}.{name} can't be pruned to {work.pattern}: {misfit}.")
        chosen.append(names)
    if unused:
        some = ", ".join(sorted(linears)[:4])
        raise BadInput(f"target {min(unused)!r} matches no linear; a layer has {some}, ...")
    return chosen


def linears_of(skeleton: Skeleton, layer: nn.Module) -> dict[str, nn.Linear]:
    """Every linear of a decoder layer that methods may change."""
    stages = engine.stages_of(skeleton.family, layer, frozenset())
    return {name: linear for stage in stages for group in stage.groups for name, linear in group.linears.items()}


def targeted(layers: str, i: int, name: str, targets: tuple[str, ...]) -> bool:
    full = (name, f"layers.{i}.{name}", f"{layers}.{i}.{name}")
    return not targets or any(fnmatch.fnmatch(f, t) for f in full for t in targets)


@dataclass
class Layerwise:
    """Compresses layers of one model. chosen: names of the linears to change, per layer."""

    skeleton: Skeleton
    work: Work
    chosen: list[set[str]]
    device: str
    clock: Clock

    def compress(
        self,
        i: int,
        layer: nn.Module,
        tensors: dict[str, torch.Tensor],
        hidden: Sequence[torch.Tensor],
        dense_hidden: Sequence[torch.Tensor],
        calls: list[engine.Call],
        emit: Callable[[torch.Tensor, torch.Tensor], None],
        lockstep: bool = True,
    ) -> dict[str, Any]:
        """Changes layer i in place and writes the result into `tensors`, the source's own of that layer.

        hidden, dense_hidden: what enters the layer in both streams, empty for a data-free method. emit: told the
        output of the compressed and of the dense layer, batch by batch. Returns the layer's facts.
        """
        facts: dict[str, Any] = {"layer": i, "linears": {}, "warnings": []}
        stages = engine.stages_of(self.skeleton.family, layer, self.work.needs)
        solve = lambda stage: self._solve(i, stage, facts)  # noqa: E731
        if not len(hidden):
            for stage in stages:
                solve(stage)
        else:
            # Its weights are the source's own tensors: they are only read until all passes are through.
            dense = self.skeleton.fill_layer(i, tensors, self.device, copies=False) if self.work.compares else None
            streams = engine.Streams(layer, dense, hidden, dense_hidden, calls)
            engine.run_layer(streams, stages, solve, emit, self.clock, lockstep)
        for name in sorted(self.chosen[i]):
            self.skeleton.store(i, f"{name}.weight", layer.get_submodule(name).weight, tensors)
        facts["sparsity"] = share_of_zeros(layer, self.chosen[i])
        return facts

    def _solve(self, i: int, stage: engine.Stage, facts: dict[str, Any]) -> None:
        for group in stage.groups:
            linears = {n: m for n, m in group.linears.items() if n in self.chosen[i]}
            if linears:
                self._solve_group(i, linears, group.stats, facts)
            group.stats.release()

    def _solve_group(self, i: int, linears: dict[str, nn.Linear], stats, facts: dict[str, Any]) -> None:
        where = f"layer {i} {next(iter(linears))}"
        weights = {name: linear.weight.float() for name, linear in linears.items()}
        method, options = methods.find(self.work.method), self.work.options
        width = next(iter(linears.values())).in_features
        if method.NEEDS and stats.tokens < max(1, STARVED * width):
            method = methods.find("magnitude")
            options = method.Options()
            facts["warnings"].append(
                f"{', '.join(linears)} saw {stats.tokens} tokens, too few for {self.work.method}: pruned by magnitude"
            )
        stats.check_finite(where)
        with self.clock("solver"):
            try:
                pruned = method.prune(weights, stats, self.work.pattern, options, self.clock)
            except NumericalFailure as failure:
                raise NumericalFailure(f"{where}: {failure} ({stats.tokens} tokens).") from failure
        for name, linear in linears.items():
            # Through the stored dtype, so that later groups see the weights that will be on disk.
            stored = pruned[name].to(self.skeleton.dtype) + 0.0
            if not stored.isfinite().all():
                beyond = f" in {self.skeleton.dtype}" if pruned[name].isfinite().all() else ""
                raise NumericalFailure(f"{where}: {self.work.method} gave NaN or Inf{beyond}.")
            facts["linears"][name] = measure(weights[name], stored.float(), stats)
            linear.weight.copy_(stored.to(linear.weight.dtype))


def share_of_zeros(layer: nn.Module, names: Iterable[str]) -> float:
    weights = [layer.get_submodule(name).weight for name in names]
    return sum(int((w == 0).sum()) for w in weights) / max(1, sum(w.numel() for w in weights))


def measure(weight: torch.Tensor, pruned: torch.Tensor, stats) -> dict[str, float]:
    """Sparsity of a linear and, where it saw tokens, its output's relative error on some of them."""
    facts = {"sparsity": float((pruned == 0).float().mean())}
    if stats.sample is not None:
        dense, compressed = (x.float() for x in stats.sample)
        wanted = dense @ weight.T
        facts["error"] = float((compressed @ pruned.T - wanted).norm() / wanted.norm().clamp(min=1e-30))
    return facts
