"""Which experts a token takes, and with what weight, in the order that RouterSpec states:
`run(logits [n, experts] float32, bias [experts] | None, router, forced=None)` -> ids [n, top_k],
weights [n, top_k] float32. `forced` ids replace the choice (replay); weights still come from the
scores. Ties go to the lowest index.

An implementation may also make the logits, as exact as a product in float32: `pack(weight [experts,
hidden] float32, dtype)` once, then `choose(x [n, hidden] of that dtype, packed, bias, router,
forced=None)` gives the same pair. Layers use it where it is there."""
