"""Weights in and out: one canonical state dict; adapters to our checkpoints, Hugging Face, the released format."""
