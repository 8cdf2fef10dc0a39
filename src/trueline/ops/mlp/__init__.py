"""down(silu(gate x) × up x): `pack(gate_up [2 width, hidden], down [hidden, width], linear)` once;
`run(x [n, hidden], packed, linear)` -> [n, hidden].

The same in two steps, for a rank that holds a part of the width and, of `down`, some rows over the
whole width: `middle(x, packed, linear)` -> [n, part]; `down(all [n, width], packed, linear)` ->
[n, rows]. With everything here the two give the bits of `run`. `middle` may have more digits than
x; `down` then returns them."""
