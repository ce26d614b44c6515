"""Offline data work: raw corpora in, token shards with manifests out. Imports no torch and no megatron-core."""
