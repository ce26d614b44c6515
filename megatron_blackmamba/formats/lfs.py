"""Pointers of Git LFS, which stand in a clone in the place of files that were not fetched."""


def is_pointer(beginning: bytes) -> bool:
    """Return whether a file that begins like this is a pointer."""
    return b"\noid sha256:" in beginning[:200]
