"""What `trueline bench gpu` measures: whole models and single kernels on one GPU, beside figures of
peers recorded on the same kind of machine (peers-h200.json)."""
