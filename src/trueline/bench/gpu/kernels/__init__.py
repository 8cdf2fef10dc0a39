"""Single kernels as the engine launches them, timed and checked."""
