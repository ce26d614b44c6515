"""Quantile balancing: `kind` is read by the config, `module` when a model is built."""
