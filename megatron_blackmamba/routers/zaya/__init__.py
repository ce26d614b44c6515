"""ZAYA1's router: `kind` is read by the config, `module` when a model is built, `arithmetic` by decoding too."""
