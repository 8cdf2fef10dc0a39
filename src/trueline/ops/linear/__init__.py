"""y = x Wᵀ. `pack(weight [out, in])` once at load, `run(x [n, in], packed)` -> [n, out].

The packed form belongs to the implementation; the plain weight may be freed.
"""
