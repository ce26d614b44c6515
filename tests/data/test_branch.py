"""A branch reads other data from its first step on, and nothing again that its trunk has read."""

from collections import Counter

import pytest

from megatron_blackmamba.data import build, refuse_changed_data
from megatron_blackmamba.data.branch import continued
from megatron_blackmamba.formats.mixture import Mixture, MixtureError
from tests.data.corpus import VOCAB, data_config, three_sources, write_mixture, write_shard

FIRST = 40


def plan(path, mixture=None):
    return build(data_config(path), vocab_size=VOCAB, total_samples=200, mixture=mixture)


def samples(plan, first, end):
    return [plan.train[k]["tokens"].tolist() for k in range(first, end)]


@pytest.fixture
def trunk(tmp_path):
    return three_sources(tmp_path)


@pytest.fixture
def better(tmp_path):
    """The trunk's source b under another name and in another folder, and a new source d."""
    write_shard(tmp_path / "better/shards/d", 30_000, 400)
    write_shard(tmp_path / "better/shards/copy_of_b", 10_000, 700)
    return write_mixture(
        tmp_path / "better",
        [
            {"name": "books", "shards": "shards/copy_of_b", "weight": 1, "tokens": 1400},
            {"name": "d", "shards": "shards/d", "weight": 1.5, "max_epochs": 9},
        ],
        [{"from_sample": 30, "weights": {"d": 0}}],
    )


def test_branch_reads_the_trunk_then_the_new_mixture(trunk, better, tmp_path):
    before = plan(trunk)
    mixture = continued(Mixture.read(trunk), Mixture.read(better), FIRST, 16)
    after = plan(trunk, mixture)
    refuse_changed_data(before.record, after.record, FIRST)
    assert samples(after, 0, FIRST) == samples(before, 0, FIRST)
    sources = Counter(after.source_names[after.train[k]["dataset_id"]] for k in range(FIRST, FIRST + 30))
    assert set(sources) == {"b", "d"}
    assert sources["d"] == pytest.approx(30 * 600 / 2000, abs=1)  # 400 × 1.5 of that and the 1,400 that books states
    assert {after.source_names[after.train[k]["dataset_id"]] for k in range(FIRST + 30, 90)} == {"b"}


def test_shared_source_goes_on_where_trunk_left_it(trunk, better):
    """The trunk reads 7 windows of b in 40 samples; the branch reads the other 36 before it reads one of them again."""
    after = plan(trunk, continued(Mixture.read(trunk), Mixture.read(better), FIRST, 16))
    of_b = [tuple(tokens) for tokens in samples(after, 0, 90) if 10_000 <= tokens[0] < 10_700]
    assert len(of_b) > 43 and len(set(of_b[:43])) == 43


def test_its_mixture_holds_in_any_folder(trunk, better, tmp_path):
    mixture = continued(Mixture.read(trunk), Mixture.read(better), FIRST, 16)
    elsewhere = tmp_path / "elsewhere.yaml"
    elsewhere.write_text(mixture.to_yaml())
    assert plan(elsewhere).fingerprint == plan(trunk, mixture).fingerprint


def test_a_branch_of_a_branch(trunk, better):
    once = continued(Mixture.read(trunk), Mixture.read(better), FIRST, 16)
    twice = continued(once, Mixture.read(trunk), FIRST + 20, 16)
    first, second = plan(trunk, once), plan(trunk, twice)
    refuse_changed_data(first.record, second.record, FIRST + 20)
    assert "a" in {second.source_names[second.train[k]["dataset_id"]] for k in range(FIRST + 20, FIRST + 60)}


def test_other_text_under_trunk_s_name_is_refused(trunk, tmp_path):
    write_shard(tmp_path / "other/shard", 50_000, 400)
    other = write_mixture(tmp_path / "other", [{"name": "b", "shards": "shard"}])
    with pytest.raises(MixtureError, match="source 'b' holds other text than the trunk's source of that name"):
        continued(Mixture.read(trunk), Mixture.read(other), FIRST, 16)


def test_a_branch_validates_on_what_it_names(trunk, tmp_path):
    """The trunk validates on nothing of b; the branch has the same tokens in another folder, and a held-out shard."""
    write_shard(tmp_path / "again/b/one", 10_000, 700)
    write_shard(tmp_path / "again/b/held_out", 60_000, 100)
    named = {"name": "b", "shards": "b", "validation": "b/held_out"}
    mixture = continued(Mixture.read(trunk), Mixture.read(write_mixture(tmp_path / "again", [named])), FIRST, 16)
    assert set(plan(trunk, mixture).validation) == {"a", "b"}
    refuse_changed_data(plan(trunk).record, plan(trunk, mixture).record, FIRST)
