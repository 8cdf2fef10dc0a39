"""Other engines on the same prompts, each in a process of its own."""
