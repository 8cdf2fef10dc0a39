"""Small random checkpoints of every runnable family, in the form in which models are published."""
