"""Layers as Ray tasks give the serial run's bits, whatever happens to a worker."""

import os
import signal

import pytest
import tiny

import llmcompress
from llmcompress.errors import BadInput

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    return tiny.save("llama", tmp_path_factory.mktemp("deep"), num_hidden_layers=6)


def prune(source, out, text, **given):
    settings = {"method": "fista", "sparsity": "2:4", "error_correction": "layer", "workers": 2}
    settings["calibration"] = llmcompress.Calibration(str(text), 12, 32)
    return llmcompress.prune(source, out=out, **{**settings, **given})


def weights(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


def parents(process):
    """Numbers of the processes that a process comes from."""
    while process > 1:
        with open(f"/proc/{process}/stat") as file:
            process = int(file.read().rpartition(")")[2].split()[1])
        yield process


def kill_a_worker():
    """SIGKILL to the first process that is running one of this test's tasks."""
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/cmdline", "rb") as file:
                if b"ray::compress_layer" in file.read() and os.getpid() in parents(int(entry)):
                    os.kill(int(entry), signal.SIGKILL)
                    return True
        except OSError:
            continue
    return False


def test_two_workers_give_the_bits_of_one_even_when_one_is_killed(deep, tmp_path, text):
    serial = prune(deep, tmp_path / "one", text, workers=1)
    killed = []

    def kill_once(kind, data):
        if kind == "layer" and not killed and kill_a_worker():
            killed.append(data["layer"])

    parallel = prune(deep, tmp_path / "two", text, on_event=kill_once)
    assert killed
    assert weights(tmp_path / "two") == weights(tmp_path / "one")
    assert [facts["layer"] for facts in parallel.layers] == list(range(6))
    assert [f["error"] for f in parallel.layers] == pytest.approx([f["error"] for f in serial.layers])
    assert not (tmp_path / "two" / ".run").exists()


def test_interrupted_parallel_run_goes_on(deep, tmp_path, text):
    prune(deep, tmp_path / "one", text, workers=1)
    done = []

    def stop(kind, data):
        if kind == "layer":
            done.append(data["layer"])
            if len(done) == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prune(deep, tmp_path / "two", text, on_event=stop)
    again = []
    prune(
        deep, tmp_path / "two", text, resume=True,
        on_event=lambda kind, data: kind == "layer" and again.append(data["layer"]),
    )  # fmt: skip
    assert sorted(done + again) == list(range(6))
    assert weights(tmp_path / "two") == weights(tmp_path / "one")


def test_layers_that_depend_on_each_other_are_refused(deep, tmp_path, text):
    with pytest.raises(BadInput, match="--workers 2 needs layers that don't depend.*--error-correction layer"):
        prune(deep, tmp_path / "out", text, error_correction="sequential")
    with pytest.raises(BadInput, match="--workers 0"):
        prune(deep, tmp_path / "out", text, workers=0)
    assert not (tmp_path / "out").exists()


def test_errors_of_a_worker_arrive_as_they_are(tmp_path, text):
    model = tiny.build("llama")
    model.model.layers[1].mlp.down_proj.weight.data.fill_(3e38)
    model.save_pretrained(tmp_path / "dense")
    tiny.tokenizer().save_pretrained(tmp_path / "dense")
    with pytest.raises(llmcompress.errors.NumericalFailure, match="layer 1"):
        prune(tmp_path / "dense", tmp_path / "out", text, method="wanda")
