"""Tasks with exact answers that a model can be evaluated on."""
