"""What `trueline bench` measures. `configs/` has the models, `gpu/` also figures of peers."""
