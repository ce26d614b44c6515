"""Which files are text worth training on, and in which order they are read."""

import gzip
import hashlib

SIZES = (500, 200_000)
"""Bytes: shorter documents teach little, longer ones are mostly tables."""


def digest(line: str) -> bytes:
    """Return a short hash, which orders names and recognizes lines."""
    return hashlib.blake2b(line.encode(), digest_size=8).digest()


def decoded(content: bytes, compressed: bool = False) -> str | None:
    """Return a file's text; None for other files, other encodings, and sizes that teach little."""
    try:
        content = gzip.decompress(content) if compressed else content
        text = content.decode("utf-8")
    except (OSError, EOFError, ValueError):
        return None  # another encoding, or damaged: this corpus takes what is easily had
    return text if SIZES[0] <= len(content) <= SIZES[1] and "\0" not in text else None
