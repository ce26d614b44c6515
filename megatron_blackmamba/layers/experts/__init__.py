"""The mixture of experts: `kind` is read by the config, the other files when they are needed."""
