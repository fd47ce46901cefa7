"""Checkpoints: read lazily, written atomically, verified after writing."""
