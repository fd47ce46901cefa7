"""Settings for all tests: no network, one thread, and a tiny Llama that most tests share."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Also for what tests start: tiny matrices are slower on several threads.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import tiny
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """Folder of a four-layer random Llama in float32."""
    return tiny.save("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A calibration file of a few thousand tokens."""
    return tiny.write_text(tmp_path_factory.mktemp("text") / "text.txt")
