"""The doctor's look at the machine itself: processors, memory, GPUs, disk, and the way between local processes."""

import errno
import os
import re
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_blackmamba.console.cores import usable_cores
from megatron_blackmamba.launch.allreduce import AllReduceError, time_all_reduce
from megatron_blackmamba.launch.findings import Finding
from megatron_blackmamba.runtime import machine

GIB = 2**30
MATMUL_SIZE = 1024
DRIVER = Path("/proc/driver/nvidia")


def processors() -> Iterator[Finding]:
    flags, model = machine.cpuinfo("flags").split(), machine.processor()
    usable = usable_cores()
    vectors = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    yield Finding("machine", "processor", f"{model}, {usable} usable cores{', ' if vectors else ''}{' '.join(vectors)}")


def matrix_products() -> Iterator[Finding]:
    """Find the faster precision for a run without a GPU: some processors multiply bf16 faster, others much slower."""
    import torch

    rate = {dtype: _products_per_second(dtype) for dtype in (torch.float32, torch.bfloat16)}
    flops = 2 * MATMUL_SIZE**3
    fp32, bf16 = (flops * each / 1e9 for each in rate.values())
    better = "bf16" if bf16 > fp32 else "fp32"
    found = f"fp32 {fp32:.0f}, bf16 {bf16:.0f} GFLOP/s: large models train faster here with training.precision={better}"
    yield Finding("machine", "matrix products", found)


def _products_per_second(dtype: Any) -> float:
    import torch

    matrix = torch.ones(MATMUL_SIZE, MATMUL_SIZE, dtype=dtype)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        matrix @ matrix
        seconds.append(time.perf_counter() - start)
    return 1 / min(seconds)


def memory() -> Iterator[Finding]:
    total, free = machine.memory()
    found = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    advice = "the tiny run needs 2 GiB: close other programs or raise the container's limit"
    yield Finding.judge("machine", "memory", found, free >= 2 * GIB, advice, "warning")


def shared_memory(gpus: int) -> Iterator[Finding]:
    """Check /dev/shm, which NCCL and the checkpoint writers use to exchange tensors within a node."""
    path = Path("/dev/shm")
    if not path.is_dir():
        return
    size = shutil.disk_usage(path).total
    needed = GIB if gpus > 1 else 16 * 2**20
    advice = f"{needed / GIB:.2f} GiB are needed: start the container with --shm-size=8g or --ipc=host"
    yield Finding.judge("machine", "shared memory", f"/dev/shm holds {size / GIB:.2f} GiB", size >= needed, advice)


def locked_memory() -> Iterator[Finding]:
    """Check the limit of locked memory, which RDMA network cards need."""
    cards = Path("/sys/class/infiniband")
    if not cards.is_dir() or not any(cards.iterdir()):
        return
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    unlimited = limit == resource.RLIM_INFINITY
    found = "unlimited" if unlimited else f"{limit / 2**20:.0f} MiB"
    advice = "InfiniBand needs `ulimit -l unlimited`: ask for it in slurmd's limits or the container"
    yield Finding.judge("machine", "locked memory", found, unlimited, advice)


def gpu_count() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def gpus(expected: int | None) -> Iterator[Finding]:
    """Check that all GPUs are present, idle, and compute the same product bit for bit if equal in model."""
    import torch

    count = gpu_count()
    if count < (expected or 0):
        advice = "look for a GPU that fell off the bus (nvidia-smi), and at CUDA_VISIBLE_DEVICES"
        yield Finding("devices", "GPUs", f"{count}, {expected} expected", "problem", advice)
    elif count == 0:
        yield Finding("devices", "GPUs", _why_no_gpu(), "note", "everything runs on the CPU, with small models")
    first: dict[str, Any] = {}
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        part, name, model = "devices", f"GPU {index}", f"{properties.name}, sm_{properties.major}{properties.minor}"
        try:
            free, total = torch.cuda.mem_get_info(index)
            product = _product(index)
        except RuntimeError as error:
            yield Finding(part, name, f"{model}: {error}", "problem", "reset the GPU or leave this node out")
            continue
        found = f"{model}, {free / GIB:.0f} of {total / GIB:.0f} GiB free"
        if not torch.equal(product, first.setdefault(properties.name, product)):
            advice = "it multiplies matrices otherwise than the one before: leave this node out"
            yield Finding(part, name, found, "problem", advice)
        else:
            advice = "another process holds memory on it: see nvidia-smi"
            yield Finding.judge(part, name, found, free > 0.9 * total, advice, "problem" if expected else "warning")


def all_reduce(gpus: int) -> Iterator[Finding]:
    processes = gpus if gpus > 1 else 2
    name = f"all-reduce, {processes} processes"
    mebibytes = 256 if gpus > 1 else 16
    try:
        seconds = time_all_reduce(processes, on_gpus=gpus > 1, mebibytes=mebibytes)
    except AllReduceError as error:
        advice = "NCCL_DEBUG=INFO shows more" if gpus > 1 else "does the host name resolve? GLOO_SOCKET_IFNAME=lo helps"
        yield Finding("devices", name, str(error), "problem", advice)
        return
    backend = "NCCL" if gpus > 1 else "gloo"
    yield Finding("devices", name, f"{mebibytes} MiB in {1e3 * seconds:.1f} ms over {backend}")


def disk(folder: Path, mebibytes: int, least: float) -> Iterator[Finding]:
    """Write, flush and read back a file where the run will live; the best of up to three tries counts.

    least: MiB/s that it must write.
    """
    place = next(path for path in (folder, *folder.parents) if path.exists())
    name = "at the run's path"
    best = (0.0, 0.0)
    try:
        for _ in range(3):
            best = max(best, _disk_speed(place, mebibytes))
            if best[0] >= least:
                break
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = (
            "free some space" if full else "name a folder that you can write to, with --folder and for runs folder=PATH"
        )
        yield Finding("disk", name, f"{place}: cannot write here: {error.strerror or error}", "problem", advice)
        return
    except ValueError:
        advice = "what was read is not what was written: do not use this disk"
        yield Finding("disk", name, str(place), "problem", advice)
        return
    free = shutil.disk_usage(place).free
    found = f"{place} writes {best[0]:.0f} MiB/s, reads {best[1]:.0f} MiB/s, {free / GIB:.0f} GiB free"
    if best[0] < least:
        advice = f"at least {least:g} MiB/s are expected: use another disk (--folder), or allow it (--threshold disk=)"
        yield Finding("disk", name, found, "problem", advice)
    else:
        advice = "a checkpoint of the 1.5B model with its optimizer takes about 20 GiB"
        yield Finding.judge("disk", name, found, free > GIB, advice, "warning")


def _disk_speed(place: Path, mebibytes: int) -> tuple[float, float]:
    """Return MiB/s written and read; raises ValueError if what is read is not what was written."""
    content = os.urandom(2**20)
    with tempfile.TemporaryFile(dir=place) as file:
        start = time.perf_counter()
        for _ in range(mebibytes):
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter() - start
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        start = time.perf_counter()
        same = all(file.read(2**20) == content for _ in range(mebibytes))
        read = time.perf_counter() - start
    if not same:
        raise ValueError
    return mebibytes / written, mebibytes / read


def _product(index: int):
    import torch

    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(MATMUL_SIZE, MATMUL_SIZE, generator=generator).to(f"cuda:{index}", torch.bfloat16)
    return (matrix @ matrix).cpu()


def _why_no_gpu() -> str:
    import torch

    if not DRIVER.exists():
        return "none (no NVIDIA driver)"
    if torch.version.cuda is None:
        return "none (this PyTorch was built for CPUs)"
    told = DRIVER / "version"
    version = re.search(r"\b\d{3}\.\d[\d.]*", told.read_text(encoding="utf-8")) if told.is_file() else None
    driver = f"driver {version[0]}" if version else "a driver of unknown version"
    return (
        f"none ({driver} and PyTorch for CUDA {torch.version.cuda}, which sees no GPU: see nvidia-smi and"
        " CUDA_VISIBLE_DEVICES; CUDA 13 needs a driver from 580 on, CUDA 12 from 525 on)"
    )
