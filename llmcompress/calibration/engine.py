"""Runs decoder layers on calibration tokens, all batches in lockstep, pausing where a group of linears begins.

Each batch's forward pass is a greenlet on the one thread: at the first linear of a group it hands over that
linear's input and sleeps inside the layer. When all batches sleep at the same group its statistics are whole; the
group is solved, its weights are changed in place, and every pass wakes up and goes on through the new weights.
So one forward of the dense layer and one of the compressed layer serve all groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from greenlet import getcurrent, greenlet
from torch import nn

from llmcompress.calibration.stats import Statistics
from llmcompress.clock import Clock
from llmcompress.errors import CompressError
from llmcompress.families import Family
from llmcompress.families.experts import ExpertStage, Routed

if TYPE_CHECKING:
    from llmcompress.checkpoint.skeleton import Skeleton

Call = tuple[tuple[Any, ...], dict[str, Any]]
Emit = Callable[[torch.Tensor, torch.Tensor], None]


@dataclass
class Group:
    """Linears that share one input: name -> module, names inside the decoder layer."""

    linears: dict[str, nn.Linear]
    stats: Statistics


@dataclass
class Stage:
    """Groups whose inputs are known at the same moment: one, or one per expert."""

    module: str
    groups: list[Group] = field(default_factory=list)


def stages_of(family: Family, layer: nn.Module, needs: frozenset[str]) -> list[Stage]:
    """The stages of a decoder layer, with empty statistics."""
    modules = dict(layer.named_modules())
    stages = []
    for names in family.groups:
        present = {name: modules[name] for name in names if isinstance(modules.get(name), nn.Linear)}
        if present:
            stages.append(Stage(next(iter(present)), [Group(present, Statistics(needs))]))
    for path, module in modules.items():
        if isinstance(module, ExpertStage):
            linears = [{f"{path}.{e}": linear} for e, linear in enumerate(module)]
            stages.append(Stage(path, [Group(one, Statistics(needs)) for one in linears]))
    return stages


def first_tensor(output: Any) -> torch.Tensor:
    """A decoder layer's hidden states: the output itself, or its first entry where it is a tuple."""
    return output if torch.is_tensor(output) else output[0]


def to_device(value: Any, device: str | torch.device) -> Any:
    """Moves every tensor inside nested tuples, lists and dicts; leaves the rest."""
    if torch.is_tensor(value):
        return value.to(device)
    if isinstance(value, dict):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(to_device(item, device) for item in value)
    return value


def record(skeleton: Skeleton, batches: Iterable[torch.Tensor], keep_hidden: Callable[[torch.Tensor], None]):
    """What each decoder layer is called with, and the hidden states that enter the first.

    skeleton: with the embeddings loaded. batches: token ids (batch, seq_len). keep_hidden: given the hidden states,
    (batch, seq_len, hidden_size), of one batch after the other.
    Returns for each distinct batch shape a list over layers of (args, kwargs) without the hidden states.
    """
    calls: dict[tuple[int, ...], list[Call]] = {}
    for ids in batches:
        recorded: list[Call] = []

        def keep(hidden_states, args, kwargs, recorded=recorded):
            if not recorded:
                keep_hidden(hidden_states)
            recorded.append((args, kwargs))
            return hidden_states

        with layers_replaced(skeleton, ids, keep):
            skeleton.model.base_model(input_ids=ids, use_cache=False)
        if len(recorded) != len(skeleton.layers):
            raise CompressError(f"the model called {len(recorded)} of its {len(skeleton.layers)} decoder layers.")
        calls[tuple(ids.shape)] = recorded
    return calls


@contextmanager
def layers_replaced(skeleton: Skeleton, ids: torch.Tensor, forward: Callable) -> Iterator[None]:
    """Inside, every decoder layer of the skeleton is `forward(hidden_states, args, kwargs) -> hidden_states`.

    The result is handed to the model the way its real layers do, as a tensor or a tuple, found out by running the
    first layer once on `ids`.
    """
    if skeleton.wrap_output is None:
        skeleton.wrap_output = _wrapping(_output_of_first_layer(skeleton, ids))

    def stand_in(hidden_states, *args, **kwargs):
        # A cache is state: replaying it would show each layer the keys of an earlier pass.
        kept = {k: None if type(v).__name__.endswith("Cache") else v for k, v in kwargs.items()}
        return skeleton.wrap_output(forward(hidden_states, args, kept))

    for layer in skeleton.layers:
        layer.forward = stand_in
    try:
        yield
    finally:
        for layer in skeleton.layers:
            del layer.forward


def _wrapping(output: Any) -> Callable[[torch.Tensor], Any]:
    if torch.is_tensor(output):
        return lambda hidden: hidden
    return lambda hidden: type(output)([hidden, *[None] * (len(output) - 1)])


def _output_of_first_layer(skeleton: Skeleton, ids: torch.Tensor) -> Any:
    class Called(Exception):
        pass

    def stop(*args, **kwargs):
        raise Called(args, kwargs)

    skeleton.layers[0].forward = stop
    try:
        skeleton.model.base_model(input_ids=ids, use_cache=False)
    except Called as called:
        args, kwargs = called.args
    finally:
        del skeleton.layers[0].forward
    return skeleton.read_layer(0)(*args, **kwargs)


class Walk:
    """One batch on its way through one layer. `advance` runs to the next pause or to the end."""

    def __init__(self, layer: nn.Module, hidden: torch.Tensor, call: Call):
        args, kwargs = call
        self.paused_at: str | None = None
        self.value: Any = None
        self._stage: Stage | None = None
        self._seen: torch.Tensor | None = None
        self._greenlet = greenlet(lambda: first_tensor(layer(hidden, *args, **kwargs)))
        self._greenlet.walk = self

    def advance(self) -> None:
        self.paused_at = None
        self.value = self._greenlet.switch()

    def close(self) -> None:
        if not self._greenlet.dead:
            self._greenlet.throw()
        # Walk and greenlet refer to each other; left to the garbage collector they would keep their tensors for long.
        del self._greenlet.walk
        self._greenlet = self.value = self._stage = self._seen = None

    def arrive(self, stage: Stage, name: str, value: Any) -> None:
        """Called inside the layer when linear `name` is about to run on `value`."""
        if isinstance(value, list):
            self._pause(stage, value)
        elif self._stage is not stage:
            self._seen = value
            self._pause(stage, value)
        elif value.shape != self._seen.shape or value.data_ptr() != self._seen.data_ptr():
            raise CompressError(f"{name} does not share its input with {stage.module}; its family file is wrong.")

    def _pause(self, stage: Stage, value: Any) -> None:
        self._stage = stage
        self.paused_at = stage.module
        getcurrent().parent.switch(value)


@contextmanager
def pauses(layer: nn.Module, stages: list[Stage]) -> Iterator[None]:
    """Makes every pass through `layer` inside a Walk stop where a stage begins."""
    handles = []

    def hook(stage: Stage, name: str):
        def arrive(module, args):
            walk = getattr(getcurrent(), "walk", None)
            if walk is not None:
                walk.arrive(stage, name, args[0])

        return arrive

    for stage in stages:
        experts = isinstance(layer.get_submodule(stage.module), ExpertStage)
        names = [stage.module] if experts else list(stage.groups[0].linears)
        for name in names:
            handles.append(layer.get_submodule(name).register_forward_pre_hook(hook(stage, name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class Streams:
    """The two sides of one layer's calibration.

    layer: gets compressed in place; dense: an untouched copy, or None when inputs are not compared.
    hidden, dense_hidden: their inputs, one (batch, seq_len, hidden_size) per batch; the same object when both start
    from the same states. calls: what else the layer is called with, per batch.
    """

    layer: nn.Module
    dense: nn.Module | None
    hidden: Sequence[torch.Tensor]
    dense_hidden: Sequence[torch.Tensor]
    calls: list[Call]


def run_layer(
    streams: Streams, stages: list[Stage], solve: Callable[[Stage], None], emit: Emit, clock: Clock, lockstep: bool
) -> None:
    """Takes a layer through its stages; `solve` changes the weights of each in place.

    `emit` is given the outputs of the compressed and of the dense layer (one tensor twice without a dense copy), one
    batch after the other. With lockstep False each batch is run again for every stage, and only one is alive at a
    time.
    """
    with pauses(streams.layer, stages), pauses(streams.dense, stages) if streams.dense else nullcontext():
        run = _lockstep if lockstep else _batch_by_batch
        run(streams, {stage.module: stage for stage in stages}, solve, emit, clock)


def _pairs(streams: Streams, number: int) -> tuple[Walk, Walk | None]:
    call = streams.calls[number]
    walk = Walk(streams.layer, streams.hidden[number], call)
    dense = Walk(streams.dense, streams.dense_hidden[number], call) if streams.dense else None
    return walk, dense


def _advance(walk: Walk, dense: Walk | None, clock: Clock) -> None:
    with clock("forward"):
        walk.advance()
        if dense:
            dense.advance()
    if dense and dense.paused_at != walk.paused_at:
        raise CompressError(f"the dense layer is at {dense.paused_at}, the compressed one at {walk.paused_at}.")


def _collect(stage: Stage, walk: Walk, dense: Walk | None, same: bool, clock: Clock) -> None:
    with clock("statistics"):
        value, other = walk.value, (dense or walk).value
        if isinstance(value, list):
            for group, routed, dense_routed in zip(stage.groups, value, other, strict=True):
                group.stats.add(aligned(routed, dense_routed), routed.x, same)
        else:
            group = stage.groups[0]
            group.stats.add(other.flatten(0, -2), value.flatten(0, -2), same)


def aligned(routed: Routed, dense: Routed) -> torch.Tensor:
    """Dense inputs for the tokens that the compressed layer sends to an expert, (tokens, n).

    A token that the dense router sent elsewhere has no dense input here; it stands for itself.
    """
    if routed is dense or torch.equal(routed.tokens, dense.tokens):
        return dense.x
    x = routed.x.clone()
    # Token numbers ascend in both, so the position of each is found by bisection.
    place = torch.searchsorted(dense.tokens, routed.tokens).clamp(max=max(len(dense.tokens) - 1, 0))
    if len(dense.tokens):
        both = dense.tokens[place] == routed.tokens
        x[both] = dense.x[place[both]]
    return x


def _lockstep(streams, stages, solve, emit, clock):
    walks = [_pairs(streams, number) for number in range(len(streams.hidden))]
    solved: set[str] = set()
    try:
        while True:
            places = set()
            for walk, dense in walks:
                _advance(walk, dense, clock)
                places.add(walk.paused_at)
                if walk.paused_at:
                    same = dense is None or (not solved and streams.hidden is streams.dense_hidden)
                    _collect(stages[walk.paused_at], walk, dense, same, clock)
            if len(places) > 1:
                raise CompressError(f"batches of one layer stopped at different linears: {sorted(map(str, places))}.")
            (place,) = places
            if place is None:
                for walk, dense in walks:
                    emit(walk.value, (dense or walk).value)
                return
            solve(stages[place])
            solved.add(place)
    finally:
        for pair in walks:
            _close(pair)


def _batch_by_batch(streams, stages, solve, emit, clock):
    solved: set[str] = set()
    while True:
        place = None
        for number in range(len(streams.hidden)):
            pair = walk, dense = _pairs(streams, number)
            try:
                for _ in range(len(solved) + 1):
                    _advance(walk, dense, clock)
                place = walk.paused_at
                if place:
                    same = dense is None or (not solved and streams.hidden is streams.dense_hidden)
                    _collect(stages[place], walk, dense, same, clock)
                else:
                    emit(walk.value, (dense or walk).value)
            finally:
                _close(pair)
        if place is None:
            return
        solve(stages[place])
        solved.add(place)


def _close(pair) -> None:
    for walk in pair:
        if walk is not None:
            walk.close()
