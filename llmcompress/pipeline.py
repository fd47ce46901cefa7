"""One compression run: opens the model, feeds the method layer by layer, writes, verifies and reports."""

from __future__ import annotations

import copy
import fnmatch
import os
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import llmcompress
from llmcompress import methods, sparsity
from llmcompress.calibration import engine
from llmcompress.calibration.tokens import Calibration, fingerprint
from llmcompress.checkpoint.output import MANIFEST, Output
from llmcompress.checkpoint.skeleton import Skeleton
from llmcompress.checkpoint.source import Source, open_source
from llmcompress.checkpoint.verify import verify
from llmcompress.clock import Clock
from llmcompress.device import available_memory, pick_device
from llmcompress.errors import BadInput, NumericalFailure
from llmcompress.evaluate.stream import Forward

ERROR_CORRECTIONS = ("layer", "sequential", "model", "off")
# Sequences of one batch: enough tokens to keep matrix products busy, few enough to stay in cache.
BATCH_TOKENS = 4096
# An expert with fewer tokens than this share of its input width has no statistics worth solving on.
STARVED = 1 / 16
PROBE_TOKENS = 64


@dataclass
class Result:
    """What a run did. `layers` holds one dict per decoder layer, `totals` what was counted in the written files."""

    out: Path
    pattern: str
    layers: list[dict[str, Any]] = field(default_factory=list)
    totals: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def prune(
    model: str | os.PathLike,
    method: str = "fista",
    sparsity: str | float = "2:4",
    out: str | os.PathLike = "compressed",
    calibration: Calibration | None = None,
    error_correction: str | None = None,
    targets: Iterable[str] = (),
    device: str = "cpu",
    overwrite: bool = False,
    trust_remote_code: bool = False,
    on_event: Callable[[str, dict[str, Any]], None] = lambda kind, data: None,
    **options: Any,
) -> Result:
    """Prunes the linears inside a model's decoder layers and writes a checkpoint to `out`.

    model: folder, .gguf file or hub id. method: one of `llmcompress methods`. sparsity: `n:m` with n KEPT of each m,
    or the share to remove. calibration: text for methods that need it; default: sampled from the model itself.
    error_correction: where the dense and the compressed activations of a layer start (`layer`, `sequential`,
    `model`, `off`); default: the method's. targets: patterns of linear names, as in `self_attn.*` or
    `layers.0.mlp.*`; default: every linear of every decoder layer. options: the method's own.
    on_event: told "start", "check", "layer" and "done" with their data.

    Raises BadInput before anything is written when the input can't be used, NumericalFailure naming the layer when
    numbers break down; neither leaves a folder behind.
    """
    run = Run(
        model, method, sparsity, out, calibration, error_correction, tuple(targets), device, overwrite,
        trust_remote_code, on_event, options,
    )  # fmt: skip
    with torch.no_grad():
        return run.go()


class Run:
    """State of one call of `prune`, in the order in which it happens."""

    def __init__(
        self, model, method, pattern, out, calibration, error_correction, targets, device, overwrite,
        trust_remote_code, on_event, options,
    ):  # fmt: skip
        self.method_name, self.method = method, methods.find(method)
        self.options = methods.make_options(method, options)
        self.pattern = sparsity.parse(pattern)
        self.calibration = calibration or Calibration("self")
        self.error_correction = error_correction or self.method.ERROR_CORRECTION
        if self.error_correction not in ERROR_CORRECTIONS:
            raise BadInput(f"--error-correction {error_correction}: use one of {', '.join(ERROR_CORRECTIONS)}.")
        self.targets, self.out, self.overwrite, self.on_event = targets, out, overwrite, on_event
        self.device = pick_device(device)
        self.source: Source = open_source(model, trust_remote_code)
        self.skeleton = Skeleton(self.source)
        self.clock = Clock()
        self.chosen = self._choose_targets()

    def _choose_targets(self) -> list[set[str]]:
        """Names of the linears to prune, per layer. Raises BadInput for a width the pattern can't take."""
        family, needs = self.skeleton.family, self.method.NEEDS
        for target in self.targets:
            if any(word in target for word in ("lm_head", "embed", "wte")):
                tied = "tied to each other" if self.skeleton.tied else "not decoder layers"
                raise BadInput(
                    f"target {target!r}: embeddings and lm_head are {tied} and are never pruned; name linears inside "
                    "decoder layers, such as 'mlp.*'."
                )
        chosen = []
        for i, layer in enumerate(self.skeleton.layers):
            stages = engine.stages_of(family, layer, needs)
            linears = {n: m for stage in stages for group in stage.groups for n, m in group.linears.items()}
            names = {n for n in linears if self._targeted(i, n)}
            for name in sorted(names):
                misfit = self.pattern.misfit(linears[name].in_features)
                if misfit:
                    raise BadInput(f"{family.layers}.{i}.{name} can't be pruned to {self.pattern}: {misfit}.")
            chosen.append(names)
        if not any(chosen):
            some = ", ".join(sorted(linears)[:4])
            raise BadInput(f"targets {', '.join(self.targets)} match no linear; a layer has {some}, ...")
        return chosen

    def _targeted(self, i: int, name: str) -> bool:
        full = (name, f"layers.{i}.{name}", f"{self.skeleton.family.layers}.{i}.{name}")
        return not self.targets or any(fnmatch.fnmatch(f, t) for f in full for t in self.targets)

    def go(self) -> Result:
        started = time.time()
        batches = self._batches()
        output = Output(self.out, self.source, self.overwrite)
        try:
            with self.clock("I/O"):
                digest = self.source.check(lambda done, total: self.on_event("check", {"done": done, "total": total}))
            result = Result(output.target, str(self.pattern))
            self._layers(batches, output, result)
            with self.clock("I/O"):
                self._other_tensors(output)
                output.copy_side_files(self.source)
                output.finish()
            with self.clock("verify"):
                result.totals = verify(output.work, self.skeleton, self.chosen, self.pattern, self.probe)
            result.seconds = {**self.clock.seconds, "total": time.time() - started}
            output.write_json(MANIFEST, self._manifest(result, digest, batches))
            output.commit()
        except BaseException:
            output.discard()
            raise
        self.on_event("done", {"result": result})
        return result

    def _batches(self) -> list[torch.Tensor]:
        """Token ids (batch, seq_len) of all calibration batches; a token or two for a data-free method's check."""
        if not self.method.NEEDS:
            return []
        with self.clock("tokens"):
            self.tokens = draw_tokens(self.source, self.calibration, self.device)
        return list(self.tokens.split(max(1, BATCH_TOKENS // self.tokens.shape[1])))

    def _layers(self, batches: list[torch.Tensor], output: Output, result: Result) -> None:
        skeleton = self.skeleton
        skeleton.fill_others(head=True)
        # A short text carried through the compressed layers; the reopened checkpoint must give the same logits.
        self.probe = Forward(skeleton, self._probe_ids(batches))
        self.dense_probe = copy.copy(self.probe)
        hidden, calls = [], []
        if batches:
            with self.clock("forward"):
                hidden, by_shape = engine.to_device(engine.record(skeleton, batches), self.device)
            calls = [by_shape[tuple(ids.shape)] for ids in batches]
        dense_hidden = hidden
        count = len(skeleton.layers)
        removed = float(self.pattern.share)
        self.on_event("start", {"method": self.method_name, "pattern": str(self.pattern), "removed": removed})
        for i in range(count):
            begun = time.time()
            with self.clock("I/O"):
                tensors = self.source.read(skeleton.layer_names(i))
                layer = skeleton.fill_layer(i, tensors, self.device)
            facts: dict[str, Any] = {"layer": i, "linears": {}}
            self.dense_probe.through(i, layer)
            layer_calls = [call[i] for call in calls]
            hidden, dense_hidden = self._one_layer(i, layer, tensors, hidden, dense_hidden, layer_calls, facts)
            with self.clock("I/O"):
                for name in sorted(self.chosen[i]):
                    skeleton.store(i, f"{name}.weight", layer.get_submodule(name).weight, tensors)
                # What runs on from here is what the file holds, rounded to its dtype.
                layer = skeleton.fill_layer(i, tensors, self.device)
                output.add_shard(f"model-{i + 1:05d}-of-{count + 1:05d}.safetensors", tensors)
            self.probe.through(i, layer)
            facts["error"] = self.probe.distance(self.dense_probe)
            facts["seconds"] = time.time() - begun
            facts["sparsity"] = share_of_zeros(layer, self.chosen[i])
            result.layers.append(facts)
            result.warnings += [f"layer {i}: {w}" for w in facts.pop("warnings", [])]
            self.on_event("layer", {**facts, "done": i + 1, "layers": count})

    def _probe_ids(self, batches: list[torch.Tensor]) -> torch.Tensor:
        if batches:
            return batches[0][:1, :PROBE_TOKENS]
        return torch.randint(self.source.config.vocab_size, (1, PROBE_TOKENS), generator=torch.manual_seed(0))

    def _one_layer(self, i, layer, tensors, hidden, dense_hidden, calls, facts):
        """Solves all stages of one layer; returns where the two streams stand after it."""
        stages = engine.stages_of(self.skeleton.family, layer, self.method.NEEDS)
        solve = lambda stage: self._solve(i, stage, facts)  # noqa: E731
        if not hidden:
            for stage in stages:
                solve(stage)
            return hidden, dense_hidden
        compares = self.error_correction != "off"
        dense = self.skeleton.fill_layer(i, tensors, self.device) if compares else None
        streams = engine.Streams(layer, dense, hidden, dense_hidden, calls)
        after, dense_after = engine.run_layer(streams, stages, solve, self.clock, lockstep=self._fits(hidden))
        engine.check_finite(after, f"layer {i}")
        if self.error_correction == "layer":
            return dense_after, dense_after
        if self.error_correction == "model":
            return after, dense_after
        return after, after

    def _fits(self, hidden: list[torch.Tensor]) -> bool:
        """Whether all batches can sleep inside a layer at once: each holds about four tensors of its FFN's width."""
        config = self.source.config
        width = max(getattr(config, "intermediate_size", 0) or 0, config.hidden_size)
        tokens = sum(h.shape[0] * h.shape[1] for h in hidden)
        streams = 1 if self.error_correction == "off" else 2
        need = tokens * (4 * config.hidden_size + 2 * width) * hidden[0].element_size() * streams
        return need < 0.6 * available_memory()

    def _solve(self, i: int, stage: engine.Stage, facts: dict[str, Any]) -> None:
        for group in stage.groups:
            linears = {n: m for n, m in group.linears.items() if n in self.chosen[i]}
            if linears:
                self._solve_group(i, linears, group.stats, facts)
            group.stats.release()

    def _solve_group(self, i: int, linears: dict[str, nn.Linear], stats, facts: dict[str, Any]) -> None:
        where = f"layer {i} {next(iter(linears))}"
        weights = {name: linear.weight.float() for name, linear in linears.items()}
        method, options = self.method, self.options
        width = next(iter(linears.values())).in_features
        if method.NEEDS and stats.tokens < max(1, STARVED * width):
            method = methods.find("magnitude")
            options = method.Options()
            facts.setdefault("warnings", []).append(
                f"{', '.join(linears)} saw {stats.tokens} tokens, too few for {self.method_name}: pruned by magnitude"
            )
        stats.check_finite(where)
        with self.clock("solver"):
            try:
                pruned = method.prune(weights, stats, self.pattern, options, self.clock)
            except NumericalFailure as failure:
                raise NumericalFailure(f"{where}: {failure} ({stats.tokens} tokens).") from failure
        for name, linear in linears.items():
            if not pruned[name].isfinite().all():
                raise NumericalFailure(f"{where}: {self.method_name} gave NaN or Inf.")
            # Through the stored dtype, so that later groups see the weights that will be on disk.
            stored = pruned[name].to(self.skeleton.dtype) + 0.0
            facts["linears"][name] = measure(weights[name], stored.float(), stats)
            linear.weight.copy_(stored.to(linear.weight.dtype))

    def _other_tensors(self, output: Output) -> None:
        count = len(self.skeleton.layers) + 1
        names = self.skeleton.other_names()
        output.add_shard(f"model-{count:05d}-of-{count:05d}.safetensors", self.source.read(names))

    def _manifest(self, result: Result, digest: str, batches: list[torch.Tensor]) -> dict[str, Any]:
        calibration = None
        if batches:
            calibration = {**self.calibration.facts(), "tokens_sha256": fingerprint(self.tokens)}
        return {
            "format": 1,
            "recipe": {
                "model": self.source.name,
                "method": self.method_name,
                "sparsity": str(self.pattern),
                "error_correction": self.error_correction if batches else None,
                "targets": list(self.targets),
                "options": asdict(self.options),
                "calibration": calibration,
            },
            "source_sha256": digest,
            "versions": {
                "llmcompress": llmcompress.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            },
            "device": str(self.device),
            "pruned": [sorted(names) for names in self.chosen],
            "totals": result.totals,
            "layers": result.layers,
            "seconds": result.seconds,
            "warnings": result.warnings,
        }


def draw_tokens(source: Source, calibration: Calibration, device: str = "cpu") -> torch.Tensor:
    """Calibration token ids for a model, int64 (samples, seq_len). Raises BadInput."""
    from llmcompress.calibration.sample import sample_from

    longest = getattr(source.config, "max_position_embeddings", None)
    if longest and calibration.seq_len > longest:
        raise BadInput(f"--seq-len {calibration.seq_len} is longer than the model's {longest} positions.")
    tokenizer = None if calibration.source == "self" else source.tokenizer()
    return calibration.tokens(tokenizer, lambda: sample_from(source, calibration, device))


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
