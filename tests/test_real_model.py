"""The claims of the README on the real model: slow, `pytest -m slow`."""

import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import llmcompress
from llmcompress.checkpoint.source import open_source
from llmcompress.cli import DEFAULT_MODEL
from llmcompress.evaluate.perplexity import perplexity, window_tokens

pytestmark = pytest.mark.slow
DATA = Path(__file__).parents[2] / "shared" / "data"
needs_text = pytest.mark.skipif(not DATA.is_dir(), reason="the calibration and evaluation texts are not here")


@pytest.fixture(scope="module")
def smollm():
    from llmcompress.checkpoint.default import find_default

    return find_default(DEFAULT_MODEL)


@pytest.fixture(autouse=True)
def all_cores(one_thread):
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@needs_text
def test_fista_beats_sparsegpt_at_two_of_four(smollm, tmp_path):
    windows = window_tokens(str(DATA / "wikitext2-test.txt"), open_source(smollm).tokenizer(), 1024, 16)
    calibration = llmcompress.Calibration(str(DATA / "calibration.txt"), 64, 512)
    found, seconds = {}, {}
    for method in ("sparsegpt", "fista"):
        result = llmcompress.prune(smollm, method, "2:4", tmp_path / method, calibration)
        found[method] = perplexity(llmcompress.load(tmp_path / method), windows).value
        seconds[method] = result.seconds["total"]
    print(found, seconds)
    assert found["fista"] <= 0.85 * found["sparsegpt"]
    assert seconds["fista"] <= 3 * seconds["sparsegpt"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "fista")
    assert model.get_input_embeddings().weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()
    tokenizer = open_source(tmp_path / "fista").tokenizer()
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    made = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(made[0])


@needs_text
def test_twenty_kills_give_the_bits_of_one_run(smollm, tmp_path):
    command = [
        sys.executable, "-m", "llmcompress.cli", "prune", "--model", smollm, "--method", "fista", "--calibration",
        str(DATA / "calibration.txt"), "--samples", "16", "--seq-len", "128", "--out",
    ]  # fmt: skip
    begun = time.perf_counter()
    subprocess.run([*command, str(tmp_path / "whole")], check=True, capture_output=True)
    whole = time.perf_counter() - begun
    draw, kills, reached = random.Random(20), 0, [0]
    journal = tmp_path / ".out.partial" / ".run" / "journal.jsonl"
    while kills < 20:
        process = subprocess.Popen([*command, str(tmp_path / "out"), "--resume"], stdout=subprocess.PIPE, text=True)
        for line in process.stdout:
            # Before this line the run only reads; afterwards a kill can fall into anything.
            if re.match("fista 2:4", line):
                break
        time.sleep(draw.uniform(0, 2.5 * whole / 30))
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGKILL)
        process.communicate()
        kills += 1
        reached.append(max(0, journal.read_bytes().count(b"\n") - 1))
    subprocess.run([*command, str(tmp_path / "out"), "--resume"], check=True, capture_output=True)
    print(f"{kills} kills, layers finished after each: {reached}")
    assert kills == 20 and reached == sorted(reached)
    for path in (tmp_path / "whole").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes(), path.name


def test_quickstart(tmp_path):
    if not shutil.which("llmcompress"):
        pytest.skip("the llmcompress command is not on PATH")
    done = subprocess.run(
        ["llmcompress", "quickstart", "--out", str(tmp_path / "out")], capture_output=True, text=True, check=True
    )
    rows = dict(re.findall(r"│ (dense|fista|sparsegpt|wanda|magnitude) +│ +([\d.]+)", done.stdout))
    assert float(rows["dense"]) < float(rows["fista"]) < float(rows["sparsegpt"]) < float(rows["magnitude"])
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out")
