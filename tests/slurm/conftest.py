"""REAL_SLURM=auto skips these tests where Slurm is missing, =require makes that a failure, =off (`make test`) skips."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, missing_programs

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    wanted, missing = os.environ.get("REAL_SLURM", "auto"), missing_programs()
    how = "apt-get install --no-install-recommends slurm-wlm munge"
    if wanted == "require":
        assert not missing, f"REAL_SLURM=require, but {', '.join(missing)} not found: {how}"
    elif wanted == "off" or missing:
        pytest.skip(
            "REAL_SLURM=off: `make test-slurm` runs them" if wanted == "off" else f"no {', '.join(missing)} here: {how}"
        )
    with Cluster() as started:
        yield started


@pytest.fixture
def slurm(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, idle again after every test."""
    yield cluster
    cluster.cancel_all()


@pytest.fixture
def blackmamba(slurm: Cluster, tmp_path: Path):
    """The command line, as a user of the cluster types it in an empty folder."""

    def run(*arguments: str, check: bool = True) -> subprocess.CompletedProcess:
        return slurm.run(sys.executable, "-m", "megatron_blackmamba", *arguments, cwd=tmp_path, check=check)

    return run
