"""Mixtures of more shards than a process may have open files."""

import os
import resource

import pytest

from megatron_blackmamba import data
from megatron_blackmamba.data import open_files
from tests.data.corpus import data_config, write_mixture, write_shard


@pytest.fixture
def few_files():
    """This process may open forty more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_mixture_may_exceed_the_open_file_limit(tmp_path, few_files):
    for number in range(60):
        write_shard(tmp_path / f"a/{number}", 100 * number, 100)
    mixture = write_mixture(tmp_path, [{"name": "a", "shards": "a", "weight": 1}])
    plan = data.build(data_config(mixture), vocab_size=2**30, total_samples=10)
    assert len(plan.train[0]["tokens"]) == 16


def test_fixed_limit_names_who_can_raise_it(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 4096))
    with pytest.raises(open_files.TooManyFiles, match="LimitNOFILE"):
        open_files.allow_open_files(5000)
