"""The HTTP front end, and the engine in a process of its own."""
