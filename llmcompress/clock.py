"""Where the time of a run goes."""

from __future__ import annotations

import time
from contextlib import contextmanager


class Clock:
    """Seconds by name: `with clock("solver"): ...`. Names nest: time counts for the innermost only."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._inner: list[float] = []

    @contextmanager
    def __call__(self, name: str):
        start = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            inner = self._inner.pop()
            self.seconds[name] = self.seconds.get(name, 0.0) + spent - inner
            if self._inner:
                self._inner[-1] += spent
