"""Routed experts: `pack(gate_up [experts, 2 width, hidden], down [experts, hidden, width], linear)`
once; `run(x [n, hidden], ids [n, k], weights [n, k], packed, linear, first=0)` -> [n, hidden].
This rank holds experts first..first+len(packed); the others' share is left out. Each active
expert's weights are read once, whatever the number of tokens.

The same in two steps, so that a token's sum can run over experts of several ranks:
`each(x, ids, packed, linear, first=0)` -> [n, k, hidden] is what each of a token's experts gives,
zeros for those of other ranks; `combine(each, weights)` -> [n, hidden]. With all experts here the
two give the bits of `run`. `each` may have more digits than x; `combine` then returns them. Only
batch-invariant mode needs the two.

An implementation may also take the shared expert in, where its width is a multiple of the others':
`pack_with_shared(gate_up, down, shared_gate_up [2 shared, hidden], shared_down [hidden, shared],
linear)` in place of `pack`; `run` then adds what it gives, with weight 1. Layers use it where it is
there."""
