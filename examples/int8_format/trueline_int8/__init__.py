"""Weights in int8 with a scale per row: the format, and a writer of such checkpoints."""
