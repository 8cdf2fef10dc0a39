"""A product per head: `pack(weight [heads, out, in], linear, steady)` once; `run(x [n, heads, in],
packed, to=None)` -> [n, heads, out], in `to` where that is given: rows of a wider tensor, say.
`steady`: a row's bits must not depend on the others."""
