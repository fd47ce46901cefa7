"""Runs that are killed, refused, locked or out of disk, and go on."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import pytest
import tiny
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import llmcompress
from llmcompress import cli
from llmcompress.checkpoint import output
from llmcompress.errors import BadInput, CantWrite

DEEP = {"num_hidden_layers": 8, "hidden_size": 64, "intermediate_size": 96}


def weights(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


def prune(source, out, text, **given):
    settings = {"method": "fista", "sparsity": "2:4", "calibration": llmcompress.Calibration(str(text), 12, 32)}
    return llmcompress.prune(source, out=out, **{**settings, **given})


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """Eight layers, wide enough that a layer takes a moment."""
    return tiny.save(
        "llama", tmp_path_factory.mktemp("deep"), num_hidden_layers=8, hidden_size=64, intermediate_size=96
    )


def killed_child(run) -> int:
    """Runs `run` in a process of its own; returns how it ended."""
    child = os.fork()
    if child == 0:
        try:
            run()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitpid(child, 0)[1]


@pytest.mark.parametrize("correction", ["sequential", "model", "layer"])
def test_kills_at_random_moments_leave_the_bits_alone(correction, deep, tmp_path, text):
    started = time.perf_counter()
    prune(deep, tmp_path / "whole", text, error_correction=correction)
    took = time.perf_counter() - started
    out, draw = tmp_path / "out", random.Random(correction)
    kills, finished = 0, [0]

    def run():
        def begun(kind, data):
            if kind == "start":
                threading.Timer(draw_delay, os.kill, (os.getpid(), signal.SIGKILL)).start()

        prune(deep, out, text, error_correction=correction, resume=True, on_event=begun)

    for attempt in range(60):
        # Longer each time, so that a slow machine gets through as well.
        draw_delay = draw.uniform(0, took / 4) * (1 + attempt / 8)
        status = killed_child(run)
        if status == 0:
            break
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        kills += 1
        journal = tmp_path / ".out.partial" / ".run" / "journal.jsonl"
        if journal.is_file():
            finished.append(max(0, journal.read_bytes().count(b"\n") - 1))
    assert kills >= 3
    assert finished == sorted(finished) and finished[-1] > 0
    assert weights(out) == weights(tmp_path / "whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "whole"]
    assert not (out / ".run").exists()


@pytest.mark.parametrize("stop_at", [1, 5, 8])
def test_resume_after_an_error_anywhere(stop_at, deep, tmp_path, text):
    kept = []

    def fail(kind, data):
        if kind == "kept":
            kept.append(data)
        if kind == "layer" and data["done"] == stop_at:
            raise KeyboardInterrupt

    whole = prune(deep, tmp_path / "whole", text)
    with pytest.raises(KeyboardInterrupt):
        prune(deep, tmp_path / "out", text, on_event=fail)
    assert [(k["finished"], k["layers"]) for k in kept] == [(stop_at, 8)]
    seen = []
    result = prune(deep, tmp_path / "out", text, resume=True, on_event=lambda kind, data: seen.append((kind, data)))
    assert [data["layer"] for kind, data in seen if kind == "layer"] == list(range(stop_at, 8))
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")
    assert [layer["error"] for layer in result.layers] == [layer["error"] for layer in whole.layers]


def test_resume_of_a_finished_run_changes_nothing(llama, tmp_path, text):
    prune(llama, tmp_path / "out", text)
    before = weights(tmp_path / "out")
    (tmp_path / "out" / ".run").mkdir()
    again = prune(llama, tmp_path / "out", text, resume=True)
    assert weights(tmp_path / "out") == before and again.layers
    assert not (tmp_path / "out" / ".run").exists()
    with pytest.raises(BadInput, match="exists"):
        prune(llama, tmp_path / "out", text, resume=True, sparsity="1:4")


def interrupted(source, out, text, **given):
    def stop(kind, data):
        if kind == "layer" and data["done"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prune(source, out, text, on_event=stop, **given)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"sparsity": "1:4"}, "recipe.sparsity was 2:4 and is 1:4"),
        ({"rounds": 1}, "recipe.options.rounds was 3 and is 1"),
        ({"error_correction": "off"}, "recipe.error_correction was sequential and is off"),
        ({"targets": ["mlp.*"]}, "recipe.targets was"),
        ({"method": "wanda"}, "recipe.method was fista and is wanda"),
    ],
)
def test_changed_settings_are_refused_naming_what_differs(change, told, deep, tmp_path, text):
    interrupted(deep, tmp_path / "out", text)
    with pytest.raises(BadInput) as error:
        prune(deep, tmp_path / "out", text, resume=True, **change)
    assert told in str(error.value) and "--overwrite" in str(error.value)
    # The refusal costs nothing: the right command still goes on.
    seen = []
    prune(deep, tmp_path / "out", text, resume=True, on_event=lambda kind, data: seen.append(kind))
    assert seen.count("layer") == 6


def test_changed_seed_source_or_text_is_refused(deep, tmp_path, text):
    interrupted(deep, tmp_path / "out", text)
    with pytest.raises(BadInput, match="recipe.calibration.seed was 0 and is 3"):
        prune(deep, tmp_path / "out", text, resume=True, calibration=llmcompress.Calibration(str(text), 12, 32, 3))
    other = tiny.save("llama", tmp_path / "other", seed=5, **DEEP)
    with pytest.raises(BadInput, match="source_sha256 was"):
        prune(other, tmp_path / "out", text, resume=True)
    changed = tiny.write_text(tmp_path / "text.txt", seed=9)
    moved = tmp_path / "moved.txt"
    text_before = text.read_text()
    try:
        text.rename(moved)
        changed.rename(text)
        with pytest.raises(BadInput, match="recipe.calibration.tokens_sha256 was"):
            prune(deep, tmp_path / "out", text, resume=True)
    finally:
        text.write_text(text_before)


def test_unfinished_run_is_not_thrown_away_unasked(deep, tmp_path, text):
    interrupted(deep, tmp_path / "out", text)
    with pytest.raises(BadInput, match="unfinished run with 2 finished layers.*--resume.*--overwrite"):
        prune(deep, tmp_path / "out", text)
    seen = []
    prune(deep, tmp_path / "out", text, overwrite=True, on_event=lambda kind, data: seen.append(kind))
    assert seen.count("layer") == 8


def test_second_run_on_one_folder_is_refused(deep, tmp_path, text):
    refused = []

    def meanwhile(kind, data):
        if kind == "layer" and not refused:
            with pytest.raises(BadInput, match="being written by another run") as error:
                prune(deep, tmp_path / "out", text, overwrite=True)
            refused.append(error)

    prune(deep, tmp_path / "out", text, on_event=meanwhile)
    assert refused and (tmp_path / "out" / "config.json").is_file()


@pytest.mark.parametrize("module", ["llmcompress.checkpoint.output", "llmcompress.calibration.states"])
def test_full_disk_is_one_sentence_and_can_be_resumed(module, deep, tmp_path, text, monkeypatch):
    prune(deep, tmp_path / "whole", text)
    real, calls = output.save_file, []

    def full(tensors, path, metadata=None):
        calls.append(path)
        if len(calls) > 4:
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")
        real(tensors, path, metadata)

    with monkeypatch.context() as patch:
        patch.setattr(f"{module}.save_file", full)
        with pytest.raises(CantWrite, match="No space left on device") as error:
            prune(deep, tmp_path / "out", text)
    assert error.value.exit_code == 1
    assert not (tmp_path / "out").exists()
    prune(deep, tmp_path / "out", text, resume=True)
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_signals_print_the_command_that_goes_on(sent, deep, tmp_path, text):
    command = [
        sys.executable, "-m", "llmcompress.cli", "prune", "--model", str(deep), "--calibration", str(text), "--samples",
        "12", "--seq-len", "32", "--out", str(tmp_path / "out"), "--rounds", "40", "--patience", "40",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("layer 2/"):
            break
    process.send_signal(sent)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == (143 if sent == signal.SIGTERM else 130), stderr
    assert "of 8 layers are kept; go on with: llmcompress prune --model" in stderr and "--resume" in stderr
    assert "Traceback" not in stderr
    assert not (tmp_path / "out").exists()
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True)
    assert done.returncode == 0 and "layers are finished already" in done.stdout
    assert (tmp_path / "out" / "config.json").is_file()


def test_events_are_logged_as_json_lines(llama, tmp_path, text):
    arguments = ["prune", "--model", llama, "--method", "wanda", "--calibration", text, "--samples", 4, "--seq-len", 16]
    arguments += ["--out", tmp_path / "out", "--log-json", tmp_path / "log.jsonl", "--quiet"]
    result = CliRunner().invoke(cli.main, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == 0 and result.output == ""
    events = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [e["layer"] for e in events if e["event"] == "layer"] == [0, 1, 2]
    assert all(e["time"] > 1e9 and e["peak_memory"] > 1e6 for e in events if e["event"] == "layer")
    assert events[-1]["event"] == "done" and events[-1]["result"]["totals"]


def test_shards_can_be_read_by_others(llama, tmp_path, text):
    prune(llama, tmp_path / "out", text)
    for path in (tmp_path / "out").iterdir():
        assert path.stat().st_mode & 0o444 == 0o444 & ~output.UMASK
    assert load_file(next((tmp_path / "out").glob("*.safetensors")))
    assert torch.get_num_threads() == 1


@pytest.fixture
def small_disk(tmp_path):
    """A file system of four megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("this user may not mount a file system")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_disk_that_fills_up_and_has_room_again(small_disk, deep, tmp_path, text):
    prune(deep, tmp_path / "whole", text)
    filler = small_disk / "filler"

    def fill(kind, data):
        if kind == "layer" and data["done"] == 3:
            with open(filler, "wb", buffering=0) as file:
                try:
                    while file.write(bytes(4096)):
                        pass
                except OSError:
                    pass

    with pytest.raises(CantWrite, match="can't be written: .*No space left") as error:
        prune(deep, small_disk / "out", text, on_event=fill)
    assert error.value.exit_code == 1 and "\n" not in str(error.value)
    filler.unlink()
    layers = []
    prune(deep, small_disk / "out", text, resume=True, on_event=lambda k, data: k == "layer" and layers.append(data))
    assert [data["layer"] for data in layers] == [3, 4, 5, 6, 7]
    assert weights(small_disk / "out") == weights(tmp_path / "whole")
