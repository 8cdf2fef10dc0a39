"""x / rms(x) × weight over the last dim: `run(x, weight, eps)`. At least float32 inside, rounded
to x's dtype before the weight, as in Llama.

`run_sum(h, y, weight, eps)` -> h + y, and the norm of that: what stands between two layers."""
