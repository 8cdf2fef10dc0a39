"""y = x Wᵀ. `pack(weight [out, in])` once at load, `run(x [n, in], packed)` -> [n, out].

The weight is a `Weight` (weights/value.py), or a tensor, which is its own dense weight. `pack`
calls `dense` where the implementation multiplies with plain numbers; one that keeps quantised
weights as they are stored says which in `formats`, and is given no others. The packed form belongs
to the implementation; the weight may be freed.

An implementation may have `run_wide(x, packed)` -> [n, out] in float32, with the digits of the sums
whatever dtype x has. Logits are made by it where it is there."""
