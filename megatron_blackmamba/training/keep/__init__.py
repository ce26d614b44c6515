"""Keeps a run: its locked folder, when checkpoints and exports are written, and the files that describe it."""
