"""A router kind with a weight and a state of its own: `kind` is read by the config, `module` when a model is built."""
