"""The engine in a process of its own, and the client of it in the server's event loop."""
