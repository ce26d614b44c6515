"""What lies on disk between the rooms: shards, mixtures, run folders. Imports no torch."""
