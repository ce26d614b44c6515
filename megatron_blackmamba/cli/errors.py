"""Word the errors that a user can fix in one line; a bug keeps its traceback."""

import errno
import os

from megatron_blackmamba.runtime.exits import refuses

NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
NOT_WRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS}
NOT_THERE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG}
FAILING_DISK = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENODEV, errno.ENXIO}
PORT_IN_USE = "EADDRINUSE"
OUT_OF_MEMORY = "DefaultCPUAllocator"
"""What torch says, in a RuntimeError, when the machine has no memory for a tensor."""
GPU_OUT_OF_MEMORY = "CUDA out of memory"
"""The same of a GPU; its allocator's fragments are gone after a restart."""


def may_pass(error: Exception) -> bool:
    """Return whether the same command may work the next time: on another port, or when a network disk answers again."""
    failing_disk = isinstance(error, OSError) and error.errno in FAILING_DISK
    passing = any(words in str(error) for words in (PORT_IN_USE, GPU_OUT_OF_MEMORY))
    return passing or failing_disk or getattr(error, "worth_another_try", False)


def in_words(error: Exception) -> str | None:
    """Return the message for the user, or None for a bug, whose traceback matters."""
    if refuses(error):
        return str(error)
    if isinstance(error, OSError) and error.errno in NO_ROOM | NOT_WRITABLE | NOT_THERE:
        where = f"{error.filename}: " if error.filename else ""
        advice = (
            ". Free some space, or give a folder on another disk"
            if error.errno in NO_ROOM
            else ". Give a file or folder that this user may use"
            if error.errno in NOT_WRITABLE
            else ""
        )
        return f"{where}{error.strerror}{advice}. (BLACKMAMBA_TRACEBACK=1 shows where it happened.)"
    if isinstance(error, OSError) and error.filename and error.errno in FAILING_DISK:
        return f"{error.filename}: {error.strerror}. Check the disk or its network, then run the same command again."
    if isinstance(error, OSError) and error.errno in {errno.EMFILE, errno.ENFILE}:
        return f"{error.strerror}: raise the limit (`ulimit -n`). (BLACKMAMBA_TRACEBACK=1 shows where it happened.)"
    where = "GPU" if GPU_OUT_OF_MEMORY in str(error) else "machine"
    if isinstance(error, MemoryError) or OUT_OF_MEMORY in str(error) or where == "GPU":
        return (
            f"this {where} is out of memory: for training, use a smaller training.micro_batch or"
            f" training.recompute=layers. ({' '.join(str(error).split()) or 'MemoryError'};"
            " BLACKMAMBA_TRACEBACK=1 shows where it happened.)"
        )
    if PORT_IN_USE in str(error):
        port = os.environ.get("MASTER_PORT", "?")
        return f"port {port} is in use by another program: set MASTER_PORT (torchrun: --master-port) to a free one"
    from megatron_blackmamba.launch.software import unmet

    wrong = unmet()  # an old library fails anywhere, in its own words
    return f"{'; '.join(wrong)}: make -B install ({type(error).__name__}: {error})" if wrong else None
