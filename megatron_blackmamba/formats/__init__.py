"""File formats that packages share: shards, mixtures, run folders. Imports no torch."""
