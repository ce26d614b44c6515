"""Random numbers that do not depend on the layout: a generator for each global parameter name."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_of(seed: int, name: str) -> int:
    """Return 63 bits that depend only on the run's seed and a global name."""
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(seed: int, name: str, device: torch.device | str = "cpu") -> torch.Generator:
    """Return the generator for one global name (a parameter, an expert of a layer), equal on all ranks and layouts."""
    return torch.Generator(device=device).manual_seed(seed_of(seed, name))


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore torch's random state of the CPU and of this process's GPU afterwards."""
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
        yield


def seed_process(seed: int) -> None:
    """Seed torch and megatron-core's own trackers (dropout, recomputation); needs the process groups."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
