"""The versions of this package and of others."""

from importlib import metadata

__version__ = "0.3.0"


def installed(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
