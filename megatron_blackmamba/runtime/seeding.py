"""Random numbers that do not depend on the layout: a generator for each global parameter name."""

import hashlib

import torch


def seed_of(seed: int, name: str) -> int:
    """63 bits that depend on the run's seed and a global name alone."""
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(seed: int, name: str, device: torch.device | str = "cpu") -> torch.Generator:
    """The generator of one global name (a parameter, an expert of a layer): the same on every rank of every layout."""
    return torch.Generator(device=device).manual_seed(seed_of(seed, name))


def seed_process(seed: int) -> None:
    """Seed torch and megatron-core's own trackers (dropout, recomputation); needs the process groups."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
