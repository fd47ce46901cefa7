"""Writing a checkpoint: shard by shard into a hidden folder beside the target, renamed when whole and verified."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import save_file

from llmcompress.checkpoint.source import PICKLED, Source
from llmcompress.errors import BadInput

if TYPE_CHECKING:
    import torch

MANIFEST = "llmcompress.json"
INDEX = "model.safetensors.index.json"


class Output:
    """A checkpoint folder in the making.

    target: where it will stand; work: where it grows. `commit` puts it in place, `discard` removes every trace.
    Raises BadInput when the target can't be written, exists, or does not fit.
    """

    def __init__(self, target: str | os.PathLike, source: Source, overwrite: bool):
        self.target = Path(target).absolute()
        self.work = self.target.with_name(f".{self.target.name}.partial")
        self._refuse_bad_target(source, overwrite)
        self._created_parents = [p for p in self.target.parents if not p.exists()]
        try:
            shutil.rmtree(self.work, ignore_errors=True)
            self.work.mkdir(parents=True)
        except OSError as error:
            self.discard()
            raise BadInput(f"--out {target} can't be written: {error.strerror}; choose another folder.") from error
        free = shutil.disk_usage(self.work).free
        if free < source.bytes:
            self.discard()
            raise BadInput(
                f"--out {target} needs {source.bytes / 1e9:.2f} GB and its disk has {free / 1e9:.2f} GB free."
            )
        self.weight_map: dict[str, str] = {}
        self.total_size = 0

    def _refuse_bad_target(self, source: Source, overwrite: bool) -> None:
        target = self.target
        if target.exists():
            if not overwrite:
                raise BadInput(f"--out {target} exists; choose another folder, or replace it with --overwrite.")
            if not target.is_dir():
                raise BadInput(f"--out {target} is a file; choose a folder.")
            if any(target.iterdir()) and not (target / "config.json").is_file():
                raise BadInput(f"--out {target} holds something other than a checkpoint; it is not overwritten.")
            resolved = source.folder.resolve()
            if resolved == target.resolve() or target.resolve() in resolved.parents:
                raise BadInput(f"--out {target} holds the model that is read; choose another folder.")
        parent = next(p for p in target.parents if p.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise BadInput(f"--out {target} can't be written: no permission in {parent}; choose another folder.")

    def add_shard(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        """Writes one safetensors file under a temporary name, syncs it, renames it."""
        path = self.work / name
        temporary = path.with_suffix(".tmp")
        save_file({k: v.contiguous() for k, v in tensors.items()}, temporary, metadata={"format": "pt"})
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        temporary.rename(path)
        self.weight_map.update(dict.fromkeys(tensors, name))
        self.total_size += sum(t.numel() * t.element_size() for t in tensors.values())

    def copy_side_files(self, source: Source) -> None:
        """Copies config, tokenizer and everything else of the source that is not weights."""
        for path in sorted(source.folder.iterdir()):
            weights = path.suffix in (*PICKLED, ".safetensors", ".gguf") or path.name.endswith(".index.json")
            if path.is_file() and not weights and not path.name.startswith(".") and path.name != MANIFEST:
                shutil.copyfile(path, self.work / path.name)

    def write_json(self, name: str, value: dict) -> None:
        temporary = self.work / f"{name}.tmp"
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(self.work / name)

    def finish(self) -> None:
        """Writes the index that makes the shards one checkpoint."""
        self.write_json(
            INDEX,
            {"metadata": {"total_size": self.total_size}, "weight_map": dict(sorted(self.weight_map.items()))},
        )

    def commit(self, before: Callable[[], None] = lambda: None) -> None:
        """Renames the finished folder to the target; an overwritten one is removed after."""
        old = self.target.with_name(f".{self.target.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if self.target.exists():
            self.target.rename(old)
        self.work.rename(self.target)
        shutil.rmtree(old, ignore_errors=True)

    def discard(self) -> None:
        """Removes what was written, and the parent folders that were made for it."""
        shutil.rmtree(self.work, ignore_errors=True)
        for parent in self._created_parents:
            try:
                parent.rmdir()
            except OSError:
                break
