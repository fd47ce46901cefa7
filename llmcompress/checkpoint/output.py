"""Writing a checkpoint: shard by shard into a hidden folder beside the target, renamed when whole and verified."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import save_file

from llmcompress.checkpoint.journal import Journal
from llmcompress.checkpoint.source import PICKLED, Source, open_shard
from llmcompress.errors import BadInput, CantWrite

if TYPE_CHECKING:
    import torch

MANIFEST = "llmcompress.json"
INDEX = "model.safetensors.index.json"
SCRATCH = ".run"
# Asked once, at import: the call changes it for the whole process.
UMASK = os.umask(0o022)
os.umask(UMASK)


class Output:
    """A checkpoint folder in the making.

    target: where it will stand; work: where it grows; scratch: what only the run needs, removed at the end; journal:
    the layers that are finished, from an earlier run when it is resumed. `commit` puts the folder in place,
    `discard` removes every trace, `close` leaves it to be resumed.
    Raises BadInput when the target can't be written, exists, is in use, or does not fit.
    """

    def __init__(self, target: str | os.PathLike, source: Source, overwrite: bool, resume: bool, scratch_bytes: int):
        self.target = Path(target).absolute()
        check_target(target, source, overwrite)
        self.work = work_folder(target)
        self.scratch = self.work / SCRATCH
        self._created_parents = [p for p in self.target.parents if not p.exists()]
        self.weight_map: dict[str, str] = {}
        try:
            self.work.mkdir(parents=True, exist_ok=True)
            self._lock = self._take_lock()
        except OSError as error:
            self._remove_parents()
            raise BadInput(f"--out {target} can't be written: {error.strerror}; choose another folder.") from error
        try:
            self._begin(resume, overwrite, source.bytes + scratch_bytes)
        except BaseException:
            self.close()
            raise

    def _take_lock(self) -> int:
        # On the folder itself, so that no lock file stays behind; the system drops it with the process.
        handle = os.open(self.work, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise BadInput(
                f"--out {self.target} is being written by another run; wait for it or choose another folder."
            ) from None
        return handle

    def _begin(self, resume: bool, overwrite: bool, need: int) -> None:
        self.scratch.mkdir(exist_ok=True)
        self.journal = Journal(self.scratch)
        finished = len(self.journal.layers)
        if finished and not resume and not overwrite:
            raise BadInput(
                f"--out {self.target}: an unfinished run with {finished} finished layers stands at {self.work}; go on "
                "with --resume, or start over with --overwrite."
            )
        if finished and resume:
            self._reopen_shards()
        else:
            # Everything but the folder itself, which holds the lock.
            for path in list(self.work.iterdir()):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            self.scratch.mkdir()
            self.journal = Journal(self.scratch)
        written = sum(path.stat().st_size for path in self.work.rglob("*.safetensors"))
        free = shutil.disk_usage(self.work).free + written
        if free < need:
            if not finished:
                self.discard()
            raise BadInput(f"--out {self.target} needs {need / 1e9:.2f} GB and its disk has {free / 1e9:.2f} GB free.")

    def _reopen_shards(self) -> None:
        for path in self.work.glob("*.tmp"):
            path.unlink()
        for path in sorted(self.work.glob("*.safetensors")):
            self.take_shard(path.name)

    def add_shard(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        """Writes one file of the checkpoint. Raises CantWrite."""
        write_shard(self.work / name, tensors)
        self.weight_map.update(dict.fromkeys(tensors, name))

    def take_shard(self, name: str) -> None:
        """Takes up a file that an earlier run or another process wrote."""
        with open_shard(self.work / name) as shard:
            self.weight_map.update(dict.fromkeys(shard.keys(), name))

    def copy_side_files(self, source: Source) -> None:
        """Copies config, tokenizer and everything else of the source that is not weights."""
        with writing(self.work):
            for path in sorted(source.folder.iterdir()):
                weights = path.suffix in (*PICKLED, ".safetensors", ".gguf") or path.name.endswith(".index.json")
                if path.is_file() and not weights and not path.name.startswith(".") and path.name != MANIFEST:
                    shutil.copyfile(path, self.work / path.name)

    def write_json(self, name: str, value: dict) -> None:
        temporary = self.work / f"{name}.tmp"
        with writing(self.work / name):
            with open(temporary, "w", encoding="utf-8") as file:
                json.dump(value, file, indent=2)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(self.work / name)

    def finish(self) -> None:
        """Writes the index that makes the shards one checkpoint."""
        size = sum(payload_bytes(self.work / name) for name in set(self.weight_map.values()))
        weight_map = dict(sorted(self.weight_map.items()))
        self.write_json(INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})

    def commit(self) -> None:
        """Renames the finished folder to the target; an overwritten one is removed after."""
        old = self.target.with_name(f".{self.target.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        with writing(self.target):
            if self.target.exists():
                self.target.rename(old)
            try:
                self.work.rename(self.target)
            except OSError:
                if old.exists():
                    old.rename(self.target)
                raise
            sync(self.target.parent)
        shutil.rmtree(old, ignore_errors=True)
        # Last: until the rename a killed run can still be resumed.
        shutil.rmtree(self.target / SCRATCH, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Gives the lock back; what was written stays."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def discard(self) -> None:
        """Removes what was written, and the parent folders that were made for it."""
        shutil.rmtree(self.work, ignore_errors=True)
        self.close()
        self._remove_parents()

    def _remove_parents(self) -> None:
        for parent in self._created_parents:
            try:
                parent.rmdir()
            except OSError:
                break


def work_folder(target: str | os.PathLike) -> Path:
    """Where a checkpoint grows: a hidden folder beside its target. Raises BadInput for a target without a name."""
    path = Path(target).absolute()
    if path.name in ("", ".."):
        raise BadInput(f"--out {target} is no name of a new folder; give one.")
    return path.with_name(f".{path.name}.partial")


def check_target(target: str | os.PathLike, source: Source, overwrite: bool) -> None:
    """Raises BadInput when a checkpoint can't be put at `target`; touches nothing."""
    path, work = Path(target).absolute(), work_folder(target)
    try:
        work.exists()
        stands = path.exists()
    except OSError as error:
        raise BadInput(f"--out {target} can't be written: {error.strerror}; choose another folder.") from error
    if stands:
        if not overwrite:
            raise BadInput(f"--out {target} exists; choose another folder, or replace it with --overwrite.")
        if not path.is_dir():
            raise BadInput(f"--out {target} is a file; choose a folder.")
        if any(path.iterdir()) and not (path / "config.json").is_file():
            raise BadInput(f"--out {target} holds something other than a checkpoint; it is not overwritten.")
        if path.is_symlink():
            raise BadInput(f"--out {target} is a link to {path.resolve()}; give that folder itself.")
        resolved = source.folder.resolve()
        if resolved == path.resolve() or path.resolve() in resolved.parents:
            raise BadInput(f"--out {target} holds the model that is read; choose another folder.")
    elif path.is_symlink():
        raise BadInput(f"--out {target} is a link to nowhere; choose another folder.")
    parent = next(p for p in path.parents if p.exists())
    if not parent.is_dir():
        raise BadInput(f"--out {target} can't be written: {parent} is no folder; choose another folder.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise BadInput(f"--out {target} can't be written: no permission in {parent}; choose another folder.")


def write_shard(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """One safetensors file, under a temporary name until it is whole and synced. Raises CantWrite."""
    temporary = path.with_suffix(".tmp")
    with writing(path):
        save_file({k: v.contiguous() for k, v in tensors.items()}, temporary, metadata={"format": "pt"})
        # The library makes files that only their owner can read.
        temporary.chmod(0o666 & ~UMASK)
        sync(temporary)
        temporary.rename(path)
        sync(path.parent)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns a failed write into CantWrite naming the file and the reason."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CantWrite(f"{path} can't be written: {reason}.") from error


def sync(path: Path) -> None:
    """Makes a file, or the names in a folder, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def payload_bytes(path: Path) -> int:
    """Bytes of all tensors in a safetensors file: what follows the header and its 8-byte length."""
    with open(path, "rb") as file:
        return path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")
