"""BlackMamba on megatron-core: pretraining of state-space mixture-of-experts models."""

__version__ = "0.1.0"
