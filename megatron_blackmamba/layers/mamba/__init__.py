"""Mamba-1: `kind` is read by the config, the other files when they are needed."""
