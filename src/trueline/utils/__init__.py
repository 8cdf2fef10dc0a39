"""What everything above may use: the environment, progress, where models are."""
