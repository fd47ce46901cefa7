"""Kernels that stand alone: they take tensors, import nothing of llmcompress, and pick by device."""

from .nm import nm_keep

__all__ = ["nm_keep"]
