"""What `trueline verify` does: requests in forced compositions, each half of each layer held
against the definition on the engine's own inputs, and how small an error would have been seen."""
