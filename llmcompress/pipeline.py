"""One compression run: opens the model, feeds the method layer by layer, writes, verifies and reports."""

from __future__ import annotations

import copy
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import llmcompress
from llmcompress import budget, methods, sparsity
from llmcompress.calibration import engine
from llmcompress.calibration.states import Boundary, States
from llmcompress.calibration.tokens import Calibration, check_vocabulary, fingerprint
from llmcompress.checkpoint.journal import differences
from llmcompress.checkpoint.output import MANIFEST, SCRATCH, Output, check_target, work_folder, writing
from llmcompress.checkpoint.skeleton import Skeleton
from llmcompress.checkpoint.source import Source, open_folder, open_shard, open_source
from llmcompress.checkpoint.verify import verify
from llmcompress.clock import Clock
from llmcompress.device import pick_device
from llmcompress.errors import BadInput, CorruptOutput
from llmcompress.evaluate.perplexity import Perplexity, streamed_perplexity, windows_for
from llmcompress.evaluate.stream import Forward
from llmcompress.layerwise import ERROR_CORRECTIONS, Layerwise, Work, choose_targets
from llmcompress.report.page import write_report

# Tokens of one batch: enough to keep matrix products busy, few enough to stay in cache.
BATCH_TOKENS = 4096
PROBE_TOKENS = 64
Event = Callable[[str, dict[str, Any]], None]


@dataclass
class Result:
    """What a run did. `layers` holds one dict per decoder layer, `totals` what was counted in the written files,
    `perplexity` before and after where it was asked for."""

    out: Path
    pattern: str
    layers: list[dict[str, Any]] = field(default_factory=list)
    totals: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    perplexity: dict[str, Any] | None = None


def prune(
    model: str | os.PathLike,
    method: str = "fista",
    sparsity: str | float = "2:4",
    out: str | os.PathLike = "compressed",
    calibration: Calibration | None = None,
    error_correction: str | None = None,
    targets: Iterable[str] = (),
    device: str = "cpu",
    max_memory: str | int | None = None,
    workers: int = 1,
    ray_address: str | None = None,
    perplexity: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    on_event: Event = lambda kind, data: None,
    **options: Any,
) -> Result:
    """Prunes the linears inside a model's decoder layers and writes a checkpoint to `out`.

    model: folder, .gguf file or hub id. method: one of `llmcompress methods`. sparsity: `n:m` with n KEPT of each m,
    or the share to remove. calibration: text for methods that need it; default: sampled from the model itself.
    error_correction: where the dense and the compressed activations of a layer start (`layer`, `sequential`,
    `model`, `off`); default: the method's. targets: patterns of linear names, as in `self_attn.*` or
    `layers.0.mlp.*`; default: every linear of every decoder layer. max_memory: bytes, or text such as "4GiB", that
    the process may take; default: what is free. workers: so many layers at once, as Ray tasks, here or on the
    cluster at ray_address; needs error_correction `layer`, in which layers are independent. perplexity: a text file
    or `wikitext2` to measure the model on before and after. resume: go on with an unfinished run of the same
    settings, if one stands at `out`; the bits will be those of a run that was never stopped. options: the method's
    own.
    on_event: told "start", "check", "layer", "kept" (what a failed run leaves to be resumed) and "done".

    Raises BadInput before anything is written when the input can't be used, NumericalFailure naming the layer when
    numbers break down, CantWrite when a disk fills up. A run that fails after its first layer can be resumed; an
    earlier one leaves nothing behind.
    """
    run = Run(
        model, method, sparsity, out, calibration, error_correction, tuple(targets), device, max_memory, workers,
        ray_address, perplexity, resume, overwrite, trust_remote_code, on_event, options,
    )  # fmt: skip
    with torch.no_grad():
        return run.go()


class Run:
    """State of one call of `prune`, in the order in which it happens."""

    def __init__(
        self, model, method, pattern, out, calibration, error_correction, targets, device, max_memory, workers,
        ray_address, perplexity, resume, overwrite, trust_remote_code, on_event, options,
    ):  # fmt: skip
        error_correction = error_correction or methods.find(method).ERROR_CORRECTION
        if error_correction not in ERROR_CORRECTIONS:
            raise BadInput(f"--error-correction {error_correction}: use one of {', '.join(ERROR_CORRECTIONS)}.")
        options = methods.make_options(method, options)
        self.work = Work(method, options, sparsity.parse(pattern), error_correction, targets)
        self.out, self.resume, self.overwrite, self.on_event = Path(out), resume, overwrite, on_event
        self.limit = budget.parse_bytes(max_memory)
        self.workers, self.ray_address, self.text = workers, ray_address, perplexity
        if workers < 1:
            raise BadInput(f"--workers {workers}: use 1 or more.")
        if workers > 1 and self.work.needs and error_correction != "layer":
            raise BadInput(
                f"--workers {workers} needs layers that don't depend on each other: add --error-correction layer "
                f"(now {error_correction})."
            )
        self.device = pick_device(device)
        self.source: Source = open_source(model, trust_remote_code)
        self.skeleton = Skeleton(self.source)
        self.calibration = (calibration or Calibration("self")).for_model(self.source.config)
        self.clock = Clock()
        self.layerwise = Layerwise(
            self.skeleton, self.work, choose_targets(self.skeleton, self.work), self.device, self.clock
        )

    def go(self) -> Result:
        started = time.time()
        # Before tokens are drawn, which may take minutes.
        check_target(self.out, self.source, self.overwrite or self.resume)
        batches, plan = self._batches()
        if self.resume and (finished := self._finished()):
            return finished
        windows = windows_for(self.source, self.text, None, None) if self.text else None
        output = Output(self.out, self.source, self.overwrite, self.resume, self._scratch_bytes(batches))
        try:
            output.journal.begin(self._identity(self._check_source()))
            before = self._perplexity(self.source, windows, output, plan)
            result = Result(output.target, str(self.work.pattern), list(output.journal.layers))
            self._layers(batches, plan, output, result)
            with self.clock("I/O"):
                self._other_tensors(output)
                output.copy_side_files(self.source)
                output.finish()
            with self.clock("verify"):
                result.totals = verify(
                    output.work, self.skeleton, self.layerwise.chosen, self.work.pattern, self.probe
                )
            after = self._perplexity(open_folder(output.work), windows, output, plan)
            if windows is not None:
                result.perplexity = {**asdict(after), "before": before.value, "after": after.value}
            result.warnings = [f"layer {facts['layer']}: {w}" for facts in result.layers for w in facts["warnings"]]
            result.seconds = {**self.clock.seconds, "total": time.time() - started}
            manifest = self._manifest(result, output.journal.identity)
            output.write_json(MANIFEST, manifest)
            with writing(output.work):
                write_report(output.work, manifest)
            output.commit()
        except BaseException as error:
            self._stop(output, error)
            raise
        self.on_event("done", {"result": result})
        return result

    def _perplexity(self, source: Source, windows: torch.Tensor | None, output: Output, plan) -> Perplexity | None:
        if windows is None:
            return None
        with self.clock("evaluation"):
            skeleton = Skeleton(source)
            skeleton.fill_others(head=True)
            self.on_event("note", {"text": f"measuring perplexity on {self.text}, {len(windows)} windows"})
            return streamed_perplexity(
                skeleton, windows, self.text, output.scratch / "evaluation", self.device, plan.in_memory
            )

    def _stop(self, output: Output, error: BaseException) -> None:
        """Keeps what can be resumed and says so; removes the rest."""
        finished = len(output.journal.layers)
        if finished and not isinstance(error, CorruptOutput):
            output.close()
            kept = {"finished": finished, "layers": len(self.skeleton.layers), "folder": str(output.work)}
            self.on_event("kept", kept)
        else:
            output.discard()

    def _finished(self) -> Result | None:
        """The result that already stands at `out`, when it is of this very run."""
        path = self.out / MANIFEST
        if not path.is_file():
            return None
        manifest = json.loads(path.read_text(encoding="utf-8"))
        same = not differences(manifest.get("recipe"), json.loads(json.dumps(self._recipe())))
        if not same or manifest.get("source_sha256") != self._check_source():
            return None
        shutil.rmtree(self.out / SCRATCH, ignore_errors=True)
        result = Result(
            self.out.absolute(), str(self.work.pattern), manifest["layers"], manifest["totals"], manifest["seconds"],
            manifest["warnings"], manifest.get("perplexity"),
        )  # fmt: skip
        self.on_event("note", {"text": f"{self.out} is finished already."})
        self.on_event("done", {"result": result})
        return result

    def _batches(self) -> tuple[list[torch.Tensor], budget.Plan]:
        """Token ids (batch, seq_len) of all calibration batches, none for a data-free method; how to run them."""
        # The driver of several workers runs layers too, to know the dense hidden states.
        share = self.limit and self.limit // (self.workers + (self.workers > 1))
        if not self.work.needs:
            return [], budget.plan(self.skeleton, self.work, 0, 0, share)
        with self.clock("tokens"):
            self.tokens = self._resumed_tokens()
            if self.tokens is None:
                self.tokens = draw_tokens(self.source, self.calibration, self.device)
        self.calibration = self.calibration.drawn(self.tokens)
        batches = list(self.tokens.split(max(1, BATCH_TOKENS // self.tokens.shape[1])))
        return batches, budget.plan(self.skeleton, self.work, self.tokens.numel(), batches[0].numel(), share)

    def _tokens_path(self, work: Path) -> Path:
        return work / SCRATCH / "tokens.safetensors"

    def _resumed_tokens(self) -> torch.Tensor | None:
        """The tokens of the run to resume, where drawing them again would take long or need the network."""
        path = self._tokens_path(work_folder(self.out))
        if self.resume and path.is_file() and not Path(self.calibration.source).is_file():
            return load_file(path)["tokens"]
        return None

    def _scratch_bytes(self, batches: list[torch.Tensor]) -> int:
        streams = 2 if self.work.error_correction == "model" else 1
        width = self.source.config.hidden_size * self.skeleton.compute_dtype.itemsize
        kept = 2 if self.workers == 1 else 2 * self.workers + 1
        return kept * streams * width * sum(ids.numel() for ids in batches)

    def _recipe(self) -> dict[str, Any]:
        calibration = None
        if self.work.needs:
            calibration = {**self.calibration.facts(), "tokens_sha256": fingerprint(self.tokens)}
        return {
            "method": self.work.method,
            "sparsity": str(self.work.pattern),
            "error_correction": self.work.error_correction if self.work.needs else None,
            "targets": list(self.work.targets),
            "options": asdict(self.work.options),
            "calibration": calibration,
        }

    def _check_source(self) -> str:
        """sha256 of the source, all of whose numbers are finite. Raises BadInput."""
        with self.clock("I/O"):
            return self.source.check(lambda done, total: self.on_event("check", {"done": done, "total": total}))

    def _identity(self, digest: str) -> dict[str, Any]:
        """What must be the same for a run to go on where an earlier one stopped."""
        return {
            "recipe": self._recipe(),
            "source_sha256": digest,
            "versions": {
                "llmcompress": llmcompress.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            },
            "device": self.device,
            "parallel": self.workers > 1,
        }

    def _layers(self, batches: list[torch.Tensor], plan: budget.Plan, output: Output, result: Result) -> None:
        count, finished = len(self.skeleton.layers), len(result.layers)
        self.skeleton.fill_others(head=True)
        # A short text carried through the compressed layers; the reopened checkpoint must give the same logits.
        self.probe = Forward(self.skeleton, self._probe_ids(batches))
        self.dense_probe = copy.copy(self.probe)
        self.on_event(
            "start",
            {
                "method": self.work.method, "pattern": str(self.work.pattern), "layers": count, "finished": finished,
                "removed": float(self.work.pattern.share), "coverage": self._coverage(), "lockstep": plan.lockstep,
                "in_memory": plan.in_memory, "memory_needed": plan.need, "memory_limit": plan.limit,
                "workers": self.workers,
            },
        )  # fmt: skip
        if batches:
            with self.clock("I/O"), writing(output.scratch):
                save_file({"tokens": self.tokens}, self._tokens_path(output.work))
        if self.workers > 1:
            from llmcompress.parallel import compress_layers

            compress_layers(self, batches, plan, output, result)
        else:
            self._one_by_one(batches, plan, output, result)

    def _one_by_one(self, batches: list[torch.Tensor], plan: budget.Plan, output: Output, result: Result) -> None:
        skeleton, count, first = self.skeleton, len(self.skeleton.layers), len(result.layers)
        boundary, calls = self._first_boundary(batches, plan, output, first)
        for i in range(first, count):
            begun = time.time()
            with self.clock("I/O"):
                tensors = self.source.read(skeleton.layer_names(i))
                layer = skeleton.fill_layer(i, tensors, self.device)
            self.dense_probe.through(i, layer)
            # After the last layer nothing is kept: its outputs are only checked.
            after = self._boundary(output if i + 1 < count else None, i + 1, plan)
            facts = self.layerwise.compress(
                i, layer, tensors, boundary.hidden, boundary.dense, [call[i] for call in calls], after.emit,
                plan.lockstep,
            )  # fmt: skip
            with self.clock("I/O"):
                output.add_shard(shard_name(i, count), tensors)
            # What runs on from here is what the file holds, rounded to its dtype.
            self.probe.through(i, skeleton.fill_layer(i, tensors, self.device, copies=False))
            facts["error"] = self.probe.distance(self.dense_probe)
            facts["seconds"] = time.time() - begun
            facts["peak_memory"] = budget.peak()
            with self.clock("I/O"):
                if i + 1 < count:
                    self._save_probe(output, i + 1)
                output.journal.add(facts)
                shutil.rmtree(boundary_folder(output, i), ignore_errors=True)
            boundary = after
            result.layers.append(facts)
            self.on_event("layer", {**facts, "done": i + 1, "layers": count})

    def _first_boundary(self, batches, plan: budget.Plan, output: Output, first: int):
        """Where the run starts: in front of layer 0, or where an earlier run stopped. Also every batch's calls."""
        count = len(self.skeleton.layers)
        reopens = 0 < first < count
        # Whatever a killed run left of boundaries that no finished layer stands for.
        for path in (output.scratch / "states").glob("*"):
            if not (reopens and path == boundary_folder(output, first)):
                shutil.rmtree(path)
        if reopens:
            probes = States.reopen(boundary_folder(output, first) / "probe", in_memory=True)
            self.probe.hidden, self.dense_probe.hidden = probes
        elif first:
            self._carry_probe(output)
        if not batches:
            return Boundary.create(None, first, self.work.error_correction, in_memory=False), []
        shapes = {tuple(ids.shape): ids for ids in batches}
        with self.clock("forward"):
            if first:
                by_shape = engine.record(self.skeleton, shapes.values(), lambda hidden: None)
                boundary = Boundary.create(None, first, self.work.error_correction, in_memory=False)
                if reopens:
                    boundary = Boundary.reopen(
                        boundary_folder(output, first), self.work.error_correction, plan.in_memory, self.device
                    )
            else:
                boundary = self._boundary(output, 0, plan)
                by_shape = engine.record(
                    self.skeleton, batches, lambda hidden: boundary.emit(*[hidden.to(self.device)] * 2)
                )
        by_shape = engine.to_device(by_shape, self.device)
        return boundary, [by_shape[tuple(ids.shape)] for ids in batches]

    def _boundary(self, output: Output | None, i: int, plan: budget.Plan) -> Boundary:
        if output is None:
            return Boundary.create(None, i, self.work.error_correction, in_memory=False)
        folder = boundary_folder(output, i)
        return Boundary.create(folder, i, self.work.error_correction, plan.in_memory, self.device)

    def _save_probe(self, output: Output, i: int) -> None:
        probes = States(boundary_folder(output, i) / "probe", in_memory=False)
        for probe in (self.probe, self.dense_probe):
            probes.append(probe.hidden)

    def _carry_probe(self, output: Output) -> None:
        """Takes the probe through all finished layers, for a run that was stopped after its last one."""
        for i in range(len(self.skeleton.layers)):
            self.probe.through(i, self.written_layer(output, i))

    def written_layer(self, output: Output, i: int) -> nn.Module:
        """Finished decoder layer i as its shard holds it."""
        with open_shard(output.work / shard_name(i, len(self.skeleton.layers))) as shard:
            tensors = {name: shard.get_tensor(name) for name in self.skeleton.layer_names(i)}
        return self.skeleton.fill_layer(i, tensors, self.device, copies=False)

    def _coverage(self) -> float:
        """Share of the decoder layers' parameters that the run may change."""
        chosen = total = 0
        for layer, names in zip(self.skeleton.layers, self.layerwise.chosen, strict=True):
            total += sum(p.numel() for p in layer.parameters())
            chosen += sum(layer.get_submodule(name).weight.numel() for name in names)
        return chosen / total

    def _probe_ids(self, batches: list[torch.Tensor]) -> torch.Tensor:
        if batches:
            return batches[0][:1, :PROBE_TOKENS]
        return torch.randint(self.source.config.vocab_size, (1, PROBE_TOKENS), generator=torch.manual_seed(0))

    def _other_tensors(self, output: Output) -> None:
        count = len(self.skeleton.layers)
        names = self.skeleton.other_names()
        output.add_shard(shard_name(count, count), {name: self.source.map(name) for name in names})

    def _manifest(self, result: Result, identity: dict[str, Any]) -> dict[str, Any]:
        return {
            "format": 1,
            "model": self.source.name,
            **identity,
            "pruned": [sorted(names) for names in self.layerwise.chosen],
            "totals": result.totals,
            "layers": result.layers,
            "seconds": result.seconds,
            "warnings": result.warnings,
            "perplexity": result.perplexity,
        }


def shard_name(i: int, count: int) -> str:
    """File of decoder layer i of `count`; what stands outside the layers follows as number `count`."""
    return f"model-{i + 1:05d}-of-{count + 1:05d}.safetensors"


def boundary_folder(output: Output, i: int) -> Path:
    return states_folder(output.work, i)


def states_folder(work: Path, i: int) -> Path:
    """Where the hidden states in front of layer i are, inside the folder of an unfinished run."""
    return work / SCRATCH / "states" / f"{i:05d}"


def draw_tokens(source: Source, calibration: Calibration, device: str = "cpu") -> torch.Tensor:
    """Calibration token ids for a model, int64 (samples, seq_len). Raises BadInput."""
    from llmcompress.calibration.sample import sample_from

    calibration = calibration.for_model(source.config)
    tokenizer = None if calibration.source == "self" else source.tokenizer()
    tokens = calibration.tokens(tokenizer, lambda: sample_from(source, calibration, device))
    check_vocabulary(tokens, source.config, source.name)
    return tokens
