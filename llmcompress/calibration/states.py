"""Hidden states of all calibration batches at one layer boundary, on disk and, where they fit, in memory."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from llmcompress.checkpoint.output import sync, writing
from llmcompress.errors import NumericalFailure

KEY = "hidden"


class States(Sequence):
    """One (batch, seq_len, hidden_size) tensor per batch, each in a safetensors file of its own.

    folder: where the files are, or None to keep nothing on disk; in_memory: keep the tensors too, otherwise each
    access maps its file for as long as the tensor lives. where: names the boundary when numbers break down.
    """

    def __init__(self, folder: Path | None, in_memory: bool, device: str = "cpu", where: str = ""):
        self.folder, self.in_memory, self.device, self.where = folder, in_memory, device, where
        self._kept: list[torch.Tensor] = []
        self._count = 0
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)

    @classmethod
    def reopen(cls, folder: Path, in_memory: bool, device: str = "cpu") -> States:
        """What an earlier process wrote to `folder`."""
        states = cls(None, in_memory, device)
        states.folder = folder
        states._count = len(list(folder.glob("*.safetensors")))
        if in_memory:
            states._kept = [states._read(number).clone() for number in range(states._count)]
        return states

    def append(self, hidden: torch.Tensor) -> None:
        """Raises NumericalFailure naming the boundary when `hidden` holds NaN or Inf."""
        if not hidden.isfinite().all():
            raise NumericalFailure(
                f"the hidden states {self.where} hold NaN or Inf; use a bfloat16 or float32 model, check its weights."
            )
        if self.folder is not None:
            path = self._path(self._count)
            with writing(path):
                save_file({KEY: hidden.cpu().contiguous()}, path)
                sync(path)
        if self.in_memory:
            self._kept.append(hidden)
        self._count += 1

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:05d}.safetensors"

    def _read(self, number: int) -> torch.Tensor:
        with safe_open(self._path(number), framework="pt") as file:
            return file.get_tensor(KEY).to(self.device)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> torch.Tensor:
        if not 0 <= number < self._count:
            raise IndexError(number)
        return self._kept[number] if self.in_memory else self._read(number)

    def remove(self) -> None:
        """Deletes the files."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


class Boundary:
    """What enters one decoder layer: `hidden` of the compressed stream, `dense` of the dense one.

    The two are one object except where the error correction is `model`.
    """

    def __init__(self, hidden: States, dense: States, error_correction: str):
        self.hidden, self.dense, self.error_correction = hidden, dense, error_correction

    @classmethod
    def create(
        cls, folder: Path | None, i: int, error_correction: str, in_memory: bool, device: str = "cpu"
    ) -> Boundary:
        """An empty boundary in front of layer i; without a folder nothing is kept on disk."""
        where = f"after layer {i - 1}" if i else "that enter layer 0"
        streams = ("hidden", "dense") if error_correction == "model" else ("hidden",)
        states = [States(folder and folder / name, in_memory, device, where) for name in streams]
        return cls(states[0], states[-1], error_correction)

    @classmethod
    def reopen(cls, folder: Path, error_correction: str, in_memory: bool, device: str = "cpu") -> Boundary:
        streams = ("hidden", "dense") if error_correction == "model" else ("hidden",)
        states = [States.reopen(folder / name, in_memory, device) for name in streams]
        return cls(states[0], states[-1], error_correction)

    def emit(self, compressed: torch.Tensor, dense: torch.Tensor) -> None:
        """Takes one batch of both streams; keeps what the next layer starts from."""
        self.hidden.append(dense if self.error_correction == "layer" else compressed)
        if self.dense is not self.hidden:
            self.dense.append(dense)
