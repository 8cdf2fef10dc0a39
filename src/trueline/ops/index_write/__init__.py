"""What an indexer does with its keys and queries before scores.

- `run(key [n, dim], view, cells [n], *, norm, bias, eps, cos, sin, pairing, rope)`: layer norm in
  float32 by `norm` and `bias` [dim], rounded to the key's dtype; the first channels turned, as many
  as cos and sin [n, half] have angles for, and rounded again; stored as the view's layout says. Of
  the view only the bytes of `cells` are written.
- `turn(q [n, heads, dim], *, cos, sin, pairing, rope)` -> a new tensor, its first channels turned.

No argument is written, all may be strided. `rope` is the chosen rotation, for implementations made
of it.
"""
