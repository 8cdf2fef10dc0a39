"""A rehearsal of tensor-parallel ranks on one device: what one rank computes is measured at its
local shapes, what the ranks exchange is counted, and both are projected to the whole model."""
