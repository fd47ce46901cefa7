"""Hidden states of all calibration batches at one layer boundary, on disk and, where they fit, in memory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

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
            save_file({KEY: hidden.cpu().contiguous()}, path)
            with open(path, "rb") as file:
                os.fsync(file.fileno())
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
