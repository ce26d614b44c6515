"""Sinkhorn with a bias that outlives training: `kind` is read by the config, `module` when a model is built."""
