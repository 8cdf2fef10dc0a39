"""What the engine remembers between steps."""
