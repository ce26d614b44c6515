"""The costs of the delta rule in Triton, for plans: memory in its backward pass, and a GPU's work."""

WIDEST = 128
"""Key channels of a head that the Triton kernels take at most."""
