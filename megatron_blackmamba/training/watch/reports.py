"""The reports of ranks, which travel with the losses of a step."""

from typing import NamedTuple


class Reports(NamedTuple):
    """What each rank reports to all others with the losses of a step; summed, what the whole world knows."""

    stop_requests: int = 0
    """Ranks that were asked to stop."""
    different_files: int = 0
    """Files of token shards that differ from their manifests."""
    pending_shards: int = 0
    """Token shards that are not verified yet."""
