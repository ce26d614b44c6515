"""Layers by the delta rule: Gated DeltaNet, Kimi Delta Attention and Gated DeltaNet-2."""
