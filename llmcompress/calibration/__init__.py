"""Calibration: where tokens come from, how layers are run on them, what is measured on the way."""
