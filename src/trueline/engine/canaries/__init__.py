"""Canaries: writes to memory that no row of a step may write are found while the engine serves.

A step writes what its rows' block tables and slots say, and nothing else. So between two checks
everything else keeps its bytes: blocks that are full, or as far as they are written; what nobody
holds; the null block and the null slot; a block and a slot behind the last ones, which nobody is
ever given. A check adds up the words of some places (cache/parts.py) and compares with the sums
taken before; only sums are kept, so it takes no memory, and nothing is written.

What a step may write is read from its message here, and not taken from the batch that the layers
get: a wrong cell is a foreign write. Each rank checks its own memory.
"""
