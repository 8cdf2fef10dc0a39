"""down(silu(gate x) × up x): `pack(gate_up [2 width, hidden], down [hidden, width], linear)` once;
`run(x [n, hidden], packed, linear)` -> [n, hidden]."""
