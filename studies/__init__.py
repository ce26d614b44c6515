"""Analyses of the repository's own studies: they use `megatron_blackmamba.study`, which trains and draws any study.

Folders in here are outputs of `blackmamba study`, and git ignores them.
"""
