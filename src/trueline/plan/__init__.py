"""Choices made once, at load: implementations, dtypes, memory."""
