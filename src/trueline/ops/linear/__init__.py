"""y = x Wᵀ. `pack(weight [out, in])` once at load, `run(x [n, in], packed)` -> [n, out].

The packed form belongs to the implementation; the plain weight may be freed.

An implementation may have `run_wide(x, packed)` -> [n, out] in float32, with the digits of the sums
whatever dtype x has. Logits are made by it where it is there."""
