"""Files in object storage (`s3://`, `gs://`, `hf://`), through fsspec: read, written, and kept as local copies.

A read is a sequence of ranges, each of which is tried again where it fails, so a connection may break at any byte.
"""

import fcntl
import glob
import hashlib
import io
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

PATIENCE = 10
"""Seconds to wait for another process of this machine without saying so."""
CACHE_VARIABLE = "BLACKMAMBA_CACHE"
_URL = re.compile(r"^[a-z][a-z0-9+]+://")
_PIECE = 8 << 20
_ATTEMPTS = 6
_FIRST_WAIT_SECONDS = 0.2
_VERSION_KEYS = ("ETag", "etag", "generation", "blob_id", "LastModified", "mtime")
"""What fsspec's libraries tell about an object that changes when it is replaced."""
_LIBRARIES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface_hub"}
T = TypeVar("T")


class RemoteError(ValueError):
    """Object storage that cannot be used; the message says which object and what to do."""


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a URL such as s3://bucket/tokens."""
    return bool(_URL.match(os.fspath(path)))


def file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, and the path there."""
    from fsspec.core import url_to_fs

    scheme = _scheme(url)
    try:
        file_system, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise RemoteError(f"{url}: {error}. pip install {_LIBRARIES[scheme]}") from None
    return file_system, path.rstrip("/")


def _scheme(url: str) -> str:
    """Return the scheme of a URL; refuse others than those of object storage, such as file://."""
    scheme = url.partition("://")[0]
    if scheme not in _LIBRARIES:
        raise RemoteError(
            f"{url}: not in object storage. Use s3://, gs:// or hf://, or a local path without {scheme}://"
        )
    return scheme


def trying(url: str, action: Callable[[], T]) -> T:
    """Run an action on object storage; try again after a failure that may pass."""
    for attempt in range(_ATTEMPTS):
        try:
            return action()
        except FileNotFoundError:
            raise RemoteError(f"{url}: no such object") from None
        except PermissionError as error:
            raise RemoteError(f"{url}: access denied ({error}). Check the credentials") from None
        except Exception as error:  # every library has its own
            if attempt + 1 == _ATTEMPTS:
                raise RemoteError(f"{url}: failed {_ATTEMPTS} times: {type(error).__name__}: {error}") from error
            time.sleep(_FIRST_WAIT_SECONDS * 2**attempt)
    raise AssertionError


def files_below(url: str) -> dict[str, dict[str, Any]]:
    """Return the objects below a URL, or the one object with this name, with their `size`, by URL."""
    fs, path = file_system(url)
    fs.invalidate_cache()
    return _by_url(url, trying(url, lambda: fs.find(path, detail=True)))


def files_matching(pattern: str) -> dict[str, dict[str, Any]]:
    """Return the objects that a pattern matches, as `files_below`; brackets belong to a name if there is one."""
    fs, path = file_system(pattern)
    fs.invalidate_cache()
    for wild in (path.replace("[", "[[]"), path):
        found = _by_url(pattern, trying(pattern, partial(fs.glob, wild, detail=True)))
        if found:
            return found
    return {}


def _by_url(url: str, found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    scheme = url.partition("://")[0]
    return {f"{scheme}://{name}": info for name, info in found.items() if info.get("type") != "directory"}


def is_folder(url: str) -> bool:
    """Return whether a URL is a folder rather than an object."""
    fs, path = file_system(url)
    return bool(trying(url, lambda: fs.isdir(path)))


class RemoteFile(io.RawIOBase):
    """An object opened for reading."""

    def __init__(self, url: str) -> None:
        self.url, self._position = url, 0
        self._fs, self._path = file_system(url)
        self._fs.invalidate_cache(self._path)  # another program may have replaced it since it was listed
        info = trying(url, lambda: self._fs.info(self._path))
        self.size = int(info["size"])
        stamps = [str(info[key]) for key in _VERSION_KEYS if info.get(key)]
        self.version = hashlib.sha256(" ".join([str(self.size), *stamps]).encode()).hexdigest()[:16]
        """Changes when the object is replaced."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        return self._position

    def readall(self) -> bytes:
        return b"".join(iter(lambda: self.read(_PIECE) or b"", b""))  # io's own reads 8 kB at a time

    def readinto(self, buffer: Any) -> int:
        start, end = self._position, min(self._position + len(buffer), self.size)
        if start >= end:
            return 0
        data = trying(self.url, lambda: self._whole(start, end))
        buffer[: len(data)] = data
        self._position = end
        return end - start

    def _whole(self, start: int, end: int) -> bytes:
        data = self._fs.cat_file(self._path, start=start, end=end)
        if len(data) != end - start:
            raise OSError(f"{len(data)} bytes instead of {end - start}")
        return data


def open_remote(url: str) -> BinaryIO:
    """Open an object for reading, in pieces of some megabytes."""
    return io.BufferedReader(RemoteFile(url), _PIECE)


def open_any(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a local file or an object for reading."""
    return open_remote(os.fspath(path)) if is_remote(path) else open(path, "rb")


def size_of(path: str | os.PathLike[str]) -> int:
    """Return the bytes of a local file or an object."""
    return RemoteFile(os.fspath(path)).size if is_remote(path) else os.stat(path).st_size


def file_sha256(path: str | os.PathLike[str], start: int = 0) -> str:
    """Return the SHA-256 of a local file or an object, from byte `start` on."""
    digest = hashlib.sha256()
    with open_any(path) as file:
        file.seek(start)
        while block := file.read(_PIECE):
            digest.update(block)
    return digest.hexdigest()


def version_of(path: str | os.PathLike[str]) -> str:
    """Return a text that changes when a local file or an object is written to or replaced."""
    if is_remote(path):
        return RemoteFile(os.fspath(path)).version
    found = os.stat(path)
    return f"{found.st_dev} {found.st_ino} {found.st_size} {found.st_mtime_ns}"


def upload(local: Path, url: str) -> None:
    """Write an object; it appears when it is whole."""
    fs, path = file_system(url)
    size = local.stat().st_size

    def put() -> None:
        fs.put_file(str(local), path)
        fs.invalidate_cache()
        if int(fs.info(path)["size"]) != size:
            raise OSError(f"{fs.info(path)['size']} bytes arrived of {size}")

    trying(url, put)


def download(url: str, target: Path) -> None:
    """Copy an object to a local file, which appears when it is whole.

    A part from an earlier call is continued, unless the object was replaced since.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        while (source := RemoteFile(url)).version != _copy(source, target):
            pass  # it was replaced meanwhile
    except OSError as error:  # of the local disk: what object storage says is a RemoteError
        raise RemoteError(
            f"{target}: {error.strerror or error}. This is the local copy of {url}: "
            f"make space for it, or name another folder in ${CACHE_VARIABLE}"
        ) from error


def _copy(source: RemoteFile, target: Path) -> str:
    """Copy an object, and return its version afterwards; the target appears only if that is still the same."""
    part = target.with_name(f".{target.name}.{source.version}.part")
    for other in target.parent.glob(f".{glob.escape(target.name)}.*.part"):
        if other != part:
            other.unlink(missing_ok=True)
    with open(part, "ab") as file:
        source.seek(file.tell())
        piece = bytearray(_PIECE)
        while count := source.readinto(piece):
            file.write(memoryview(piece)[:count])
        file.flush()
        os.fsync(file.fileno())
    version = RemoteFile(source.url).version
    if version == source.version:
        os.replace(part, target)
    return version


def cached(url: str) -> Path:
    """Return where local copies of a URL lie: below $BLACKMAMBA_CACHE, by default ~/.cache/blackmamba."""
    root = os.path.normpath(cache_folder() / _scheme(url))
    path = Path(os.path.normpath(os.path.join(root, url.partition("://")[2])))
    if not path.is_relative_to(root):  # its copies would replace other files
        raise RemoteError(f"{url}: names no object of a bucket. Write it as s3://BUCKET/PATH, without ..")
    return path


def cache_folder() -> Path:
    """Return the folder that holds all local copies."""
    return Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/blackmamba").expanduser().absolute()


def local(path: str | os.PathLike[str]) -> Path:
    """Return a local path as it is, and where local copies of a URL lie."""
    return cached(os.fspath(path)) if is_remote(path) else Path(path)


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Let one process of this machine into the block, for each `path`."""
    with ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(path.with_name(f".{path.name}.lock"), "a+b"))
            _lock(file, path)
        except OSError as error:  # read-only, full, or without locks
            raise RemoteError(
                f"{path.parent}: cannot hold local copies: {error.strerror or error}. "
                f"Name another folder in ${CACHE_VARIABLE}"
            ) from error
        yield


def _lock(file: BinaryIO, path: Path) -> None:
    """Lock the file, with this process's number in it; say who is waited for if that takes long."""
    end, said = time.monotonic() + PATIENCE, False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if not said and time.monotonic() > end:
                said = True
                file.seek(0)
                holder = file.read().decode() or "another process"
                print(f"blackmamba: waiting for {holder}, which fetches {path}", file=sys.stderr, flush=True)
            time.sleep(0.05)
    with suppress(OSError):  # on a full disk nobody is named, and what is there can be used
        os.ftruncate(file.fileno(), 0)
        os.write(file.fileno(), f"process {os.getpid()}".encode())
