"""Layers as Ray tasks, on one machine or a cluster, for methods whose layers do not depend on each other.

The driver runs the dense model and writes the hidden states in front of each layer to the scratch folder, which every
machine must see; a layer is a task as soon as its states are there. A task whose worker dies is run again.
"""

from __future__ import annotations

import os
import shutil
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from llmcompress import budget
from llmcompress.calibration import engine
from llmcompress.calibration.states import Boundary, States
from llmcompress.checkpoint.output import Output, write_shard
from llmcompress.checkpoint.skeleton import Skeleton
from llmcompress.checkpoint.source import open_source
from llmcompress.clock import Clock
from llmcompress.errors import BadInput, CompressError
from llmcompress.layerwise import Layerwise, Work, choose_targets

if TYPE_CHECKING:
    from llmcompress.pipeline import Result, Run

RETRIES = 3


def compress_layers(run: Run, batches: list[torch.Tensor], plan: budget.Plan, output: Output, result: Result) -> None:
    """Compresses every layer that the journal lacks; `run.probe` has gone through all of them afterwards."""
    from llmcompress.pipeline import boundary_folder, shard_name

    count = len(run.skeleton.layers)
    shutil.rmtree(output.scratch / "states", ignore_errors=True)
    finished = {facts["layer"]: facts for facts in output.journal.layers}
    boundary = Boundary.create(boundary_folder(output, 0), 0, "layer", plan.in_memory, run.device)
    by_shape = engine.record(run.skeleton, batches, lambda hidden: boundary.emit(*[hidden.to(run.device)] * 2))
    by_shape = engine.to_device(by_shape, run.device)
    calls = [by_shape[tuple(ids.shape)] for ids in batches]
    dense_probes = []
    with Tasks(run, [tuple(ids.shape) for ids in batches], plan, output) as tasks:

        def collect(wait_below: int) -> None:
            for facts in tasks.done(wait_below):
                i = facts["layer"]
                shutil.rmtree(boundary_folder(output, i), ignore_errors=True)
                output.journal.add(facts)
                finished[i] = facts
                run.on_event("layer", {**facts, "done": len(finished), "layers": count})

        for i in range(count):
            if i not in finished:
                tasks.start(i)
            layer = run.skeleton.read_layer(i, run.device)
            run.dense_probe.through(i, layer)
            dense_probes.append(run.dense_probe.hidden)
            if i + 1 < count:
                # The next states are only written when there is room for them on disk and somebody to use them.
                collect(wait_below=2 * run.workers)
                after = Boundary.create(boundary_folder(output, i + 1), i + 1, "layer", plan.in_memory, run.device)
                with run.clock("forward"):
                    for hidden, call in zip(boundary.hidden, calls, strict=True):
                        args, kwargs = call[i]
                        out = engine.first_tensor(layer(hidden, *args, **kwargs))
                        after.emit(out, out)
                if i in finished:
                    shutil.rmtree(boundary_folder(output, i), ignore_errors=True)
                boundary = after
        collect(wait_below=1)
    for i in range(count):
        run.probe.through(i, run.written_layer(output, i))
        run.dense_probe.hidden = dense_probes[i]
        finished[i]["error"] = run.probe.distance(run.dense_probe)
        output.take_shard(shard_name(i, count))
    result.layers[:] = [finished[i] for i in range(count)]


class Tasks:
    """The layers in work. Starts Ray, or joins a cluster, and leaves it at the end."""

    def __init__(self, run: Run, shapes: list[tuple[int, ...]], plan: budget.Plan, output: Output):
        ray = import_ray()
        self.ray = ray
        address = {"address": run.ray_address} if run.ray_address else {"num_cpus": run.workers}
        # A worker imports the same llmcompress as this process, wherever that was started.
        path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
        # Ray starts its workers at the lowest priority; they are all there is to do here.
        os.environ.setdefault("RAY_worker_niceness", "0")
        threads = max(1, torch.get_num_threads() // run.workers)
        environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        try:
            ray.init(
                **address, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
                runtime_env={"env_vars": environment},
            )  # fmt: skip
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise BadInput(f"--ray-address {run.ray_address}: Ray can't be reached: {error}") from error
        gpus = 1 if run.device.startswith("cuda") else 0
        self.task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=RETRIES)(compress_layer)
        self.shared = ray.put((
            str(run.source.folder.absolute()), run.source.trust_remote_code, run.work, run.device, threads,
            str(output.work), shapes, plan,
        ))  # fmt: skip
        self.running: list[Any] = []

    def start(self, i: int) -> None:
        self.running.append(self.task.remote(i, self.shared))

    def done(self, wait_below: int) -> list[dict[str, Any]]:
        """Facts of the layers that are finished, after waiting until fewer than `wait_below` run."""
        facts = []
        while self.running:
            patience = None if len(self.running) >= wait_below else 0
            ready, self.running = self.ray.wait(self.running, num_returns=1, timeout=patience)
            if not ready:
                break
            try:
                facts += self.ray.get(ready)
            except self.ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, CompressError):
                    raise error.cause from None
                raise
            except self.ray.exceptions.RayError as error:
                raise CompressError(f"a worker failed {RETRIES + 1} times: {str(error).splitlines()[0]}") from error
        return facts

    def __enter__(self) -> Tasks:
        return self

    def __exit__(self, *exception) -> None:
        self.ray.shutdown()


def import_ray():
    """Raises BadInput when Ray is not installed."""
    try:
        import ray
    except ImportError:
        raise BadInput("--workers above 1 needs Ray: pip install 'llmcompress[ray]'.") from None
    return ray


@cache
def opened(folder: str, trust_remote_code: bool) -> Skeleton:
    """The skeleton of a model, made once in each worker."""
    skeleton = Skeleton(open_source(folder, trust_remote_code))
    skeleton.fill_others(head=False)
    return skeleton


@torch.no_grad()
def compress_layer(i: int, shared: tuple) -> dict[str, Any]:
    """The task: reads one layer's states and weights, writes its shard, returns its facts."""
    folder, trust_remote_code, work, device, threads, out, shapes, plan = shared
    begun = time.time()
    torch.set_num_threads(threads)
    skeleton = opened(folder, trust_remote_code)
    calls = []
    if shapes:
        distinct = [torch.zeros(shape, dtype=torch.long) for shape in dict.fromkeys(shapes)]
        by_shape = engine.to_device(engine.record(skeleton, distinct, lambda hidden: None), device)
        calls = [by_shape[shape][i] for shape in shapes]
    from llmcompress.pipeline import shard_name, states_folder

    hidden = States.reopen(states_folder(Path(out), i) / "hidden", plan.in_memory, device)
    tensors = skeleton.source.read(skeleton.layer_names(i))
    layer = skeleton.fill_layer(i, tensors, device)
    layerwise = Layerwise(skeleton, work, chosen_once(skeleton, work), device, Clock())
    after = Boundary.create(None, i + 1, "layer", in_memory=False)
    facts = layerwise.compress(i, layer, tensors, hidden, hidden, calls, after.emit, plan.lockstep)
    write_shard(Path(out) / shard_name(i, len(skeleton.layers)), tensors)
    return {**facts, "seconds": time.time() - begun, "peak_memory": budget.peak()}


@cache
def chosen_once(skeleton: Skeleton, work: Work) -> list[set[str]]:
    return choose_targets(skeleton, work)
