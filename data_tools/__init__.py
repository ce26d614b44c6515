"""Offline data work: raw corpora in, token shards with manifests out. Imports no torch and no megatron-core.

The folder is imported as `megatron_blackmamba.data_tools`, through a link (docs/architecture.md says why).
"""
