"""Training: `loop.py` is the run. A package each says how it starts, takes a step, watches, records and keeps it."""
