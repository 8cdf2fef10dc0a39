"""One folder an op: its contract, its definition in `reference.py`, and its implementations."""
