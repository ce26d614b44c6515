"""The dense MLP: `kind` is read by the config, the other files when they are needed."""
