"""The files that benchmarks.mixture_scale reads."""

from benchmarks import mixture_scale
from megatron_blackmamba.formats.shards import Shard


def test_cold_shard_holds_ids_of_its_vocabulary(tmp_path, monkeypatch):
    monkeypatch.setattr(mixture_scale, "COLD_TOKENS", 10**5)
    mixture_scale.write_cold(tmp_path)
    shard = Shard.open(tmp_path / "a/shard_00001")
    ids = shard.document(shard.manifest.documents - 1)
    assert 0 < ids.max() < mixture_scale.VOCABULARY
