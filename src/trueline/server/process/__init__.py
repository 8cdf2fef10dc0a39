"""The engine in its own process, and the event loop's side of it."""
