"""llmcompress: compression methods for Hugging Face decoder models on one engine."""

from importlib import import_module

__version__ = "0.1.0"

_HOMES = {
    "prune": "llmcompress.pipeline",
    "load": "llmcompress.checkpoint.load",
    "Calibration": "llmcompress.calibration.tokens",
}
__all__ = ["Calibration", "__version__", "load", "prune"]


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'llmcompress' has no attribute {name!r}")
