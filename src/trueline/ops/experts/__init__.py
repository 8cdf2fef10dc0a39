"""Routed experts: `pack(gate_up [experts, 2 width, hidden], down [experts, hidden, width], linear)`
once; `run(x [n, hidden], ids [n, k], weights [n, k], packed, linear, first=0)` -> [n, hidden].
This rank holds experts first..first+len(packed); the others' share is left out. Each active
expert's weights are read once, whatever the number of tokens."""
