"""Numbers in words, as people read them."""


def duration(seconds: float) -> str:
    """Return a time in the largest unit of which it has at least two."""
    for unit, length in (("days", 86400), ("hours", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:,.1f} s"
