"""Adam over many tensors at once; `engine/adam.py` is the optimizer that calls it."""
