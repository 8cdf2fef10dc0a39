"""A product per head: `pack(weight [heads, out, in], linear, steady)` once; `run(x [n, heads, in],
packed)` -> [n, heads, out]. `steady`: a row's bits must not depend on the others."""
