"""Documents shown from shards that this package did not write."""

import pytest

from megatron_blackmamba.data_tools import inspection
from megatron_blackmamba.data_tools.rejects import InputError
from megatron_blackmamba.formats.shards import Shard
from tests.data.corpus import write_shard


def test_shards_without_sources_are_named(tmp_path, monkeypatch):
    """Another program may have written their manifest."""
    shard = Shard.open(write_shard(tmp_path / "shard", 0, 74))
    monkeypatch.setattr(inspection, "tokenizer_of", lambda *_: None)
    with pytest.raises(InputError, match=r"shard\.idx: is damaged"):
        next(inspection.documents_at([shard], [0]))
