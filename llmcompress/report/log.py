"""Events of a run as JSON lines, for other programs."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from typing import Any

from llmcompress.errors import BadInput


class JsonLog:
    """Appends {"time": seconds since 1970, "event": kind, ...} per event to a file; does nothing without one.

    Raises BadInput when the file can't be opened.
    """

    def __init__(self, path: str | os.PathLike | None):
        try:
            self.file = open(path, "a", encoding="utf-8") if path else None  # noqa: SIM115
        except OSError as error:
            raise BadInput(f"--log-json {path} can't be written: {error.strerror}; choose another file.") from error

    def __enter__(self) -> JsonLog:
        return self

    def __exit__(self, *exception) -> None:
        if self.file:
            self.file.close()

    def on_event(self, kind: str, data: dict[str, Any]) -> None:
        if self.file:
            entry = {"time": time.time(), "event": kind, **data}
            self.file.write(json.dumps(entry, default=plain) + "\n")
            self.file.flush()


def plain(value: Any) -> Any:
    """A JSON value for what json does not know."""
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else str(value)
