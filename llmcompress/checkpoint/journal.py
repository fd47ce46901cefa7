"""What a run has finished, one JSON line each, so that a killed run goes on where it was."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from llmcompress.errors import BadInput

NAME = "journal.jsonl"


class Journal:
    """Lines of a run: the first says what run it is, each further one is a finished layer's facts.

    A line counts once it is whole and synced; a torn last line is a layer that was not finished.
    """

    def __init__(self, folder: Path):
        self.path = folder / NAME
        self.identity: dict[str, Any] | None = None
        self.layers: list[dict[str, Any]] = []
        self._read()

    def _read(self) -> None:
        if not self.path.is_file():
            return
        whole = 0
        for line in self.path.read_bytes().splitlines(keepends=True):
            try:
                entry = json.loads(line)
            except ValueError:
                break
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            if self.identity is None:
                self.identity = entry
            else:
                self.layers.append(entry)
        # What was torn is cut off, or the next line would be appended to it.
        os.truncate(self.path, whole)

    def begin(self, identity: dict[str, Any]) -> None:
        """Writes the first line, or compares it with the one that stands. Raises BadInput naming what differs."""
        identity = json.loads(json.dumps(identity))
        if self.identity is None:
            self._append(identity)
            self.identity = identity
            return
        changes = differences(self.identity, identity)
        if changes:
            raise BadInput(
                f"--resume: this is not the run that was begun: {'; '.join(changes)}. Give the same settings, or "
                "--overwrite to start over."
            )

    def add(self, facts: dict[str, Any]) -> None:
        """Records a finished layer; its files must be synced before."""
        self._append(facts)
        self.layers.append(facts)

    def _append(self, entry: dict[str, Any]) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())


def differences(before: Any, now: Any, name: str = "") -> list[str]:
    """Where two nested JSON values differ, as "name was A and is B"."""
    if isinstance(before, dict) and isinstance(now, dict):
        changes = []
        for key in sorted(before.keys() | now.keys()):
            inner = f"{name}.{key}" if name else key
            changes += differences(before.get(key), now.get(key), inner)
        return changes
    return [] if before == now else [f"{name} was {before} and is {now}"]
