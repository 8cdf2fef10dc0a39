"""How the built-in models were made: see `train.py`."""
