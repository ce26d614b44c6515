"""Watches a run: the guard of the loss, replicas of weights, slow ranks, token shards."""
