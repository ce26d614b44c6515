import json
import shutil

import pytest
import torch

from megatron_blackmamba.checkpoint.reading import eod_id
from megatron_blackmamba.data import BatchStream, DataError, build, refuse_changed_data
from megatron_blackmamba.formats.find_shards import find_shards
from megatron_blackmamba.formats.mixture import MixtureError
from megatron_blackmamba.settings import DataConfig
from tests.data.corpus import VOCAB, data_config, three_sources, write_mixture, write_shard


def plan(mixture, total_samples=200, **more):
    return build(data_config(mixture, **more), vocab_size=VOCAB, total_samples=total_samples)


def samples(plan, first, end):
    return [(plan.train[k]["dataset_id"], plan.train[k]["tokens"].tolist()) for k in range(first, end)]


@pytest.fixture
def mixture(tmp_path):
    return three_sources(tmp_path)


def rewritten(mixture, old, new):
    text = mixture.read_text()
    assert old in text
    mixture.write_text(text.replace(old, new))
    return mixture


def saved(plan):
    """Return the record as read back from data_plan.json."""
    return json.loads(json.dumps(plan.describe()))


def test_plan_reads_and_reports_each_source_share(mixture):
    data = plan(mixture, total_samples=4246)
    assert data.source_names == ["a", "b", "c"]
    assert list(data.validation) == ["a"]
    assert data.train[0]["tokens"].dtype == torch.int64
    planned = data.describe()["planned"]
    # tokens × weight: 1503, 350, 270 of 2123
    assert [planned["sources"][name]["samples"] for name in "abc"] == [3006, 700, 540]
    assert planned["sources"]["c"]["epochs"] == pytest.approx(540 * 16 / 90)


@pytest.mark.parametrize("more, unused", [(0, 0), (76, 0), (77, 77), (4000, 4000)])
def test_rows_beyond_padding_are_counted_as_unused(mixture, more, unused):
    assert VOCAB % 100 == 24
    assert plan(mixture).unused_rows(VOCAB + more, multiple=100) == unused


def test_held_out_shards_are_never_trained_on(mixture):
    data = plan(mixture)
    trained = {token for source, tokens in samples(data, 0, 400) if source == 0 for token in tokens}
    held_out = {token for i in range(len(data.validation["a"])) for token in data.validation["a"][i]["tokens"].tolist()}
    assert trained == set(range(1503))
    assert held_out - {0} == set(range(2000, 2100))  # 0: the filling of the last window


def test_moved_and_renamed_shards_are_the_same_data(mixture, tmp_path):
    before = plan(mixture)
    moved = tmp_path / "elsewhere"
    for shard in ("a/one", "a/two", "a/held_out", "b/one", "c/one"):
        for suffix in (".bin", ".idx", ".manifest.json"):
            target = moved / (shard.replace("one", "zzz") + suffix)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(tmp_path / (shard + suffix), target)
    after = plan(shutil.copy(mixture, moved / "mixture.yaml"))
    assert after.fingerprint == before.fingerprint
    assert samples(after, 0, 100) == samples(before, 0, 100)
    refuse_changed_data(saved(before), after.record, 100)


def test_record_names_the_eod_of_the_data(tmp_path):
    shard = write_shard(tmp_path / "a/one", 0, 1000, eod=7)
    record = plan(write_mixture(tmp_path, [{"name": "a", "shards": str(shard), "weight": 1}])).record
    assert eod_id({"data": record}) == 7


def test_changed_weights_repeat_and_skip_nothing(mixture, tmp_path):
    phases = [{"from_sample": 101, "weights": {"a": 0, "b": 4}}, {"from_tokens": 300 * 16 - 1, "weights": {"a": 1}}]
    changed = write_mixture(
        tmp_path / "b",
        [
            {"name": "a", "shards": "../a", "validation": "../a/held_out", "weight": 1},
            {"name": "b", "shards": "../b", "weight": 0.5},
            {"name": "c", "shards": "../c", "weight": 3},
        ],
        phases,
    )
    before, after = plan(mixture), plan(changed)
    assert samples(before, 0, 101) == samples(after, 0, 101)
    assert before.fingerprint != after.fingerprint
    assert 0 not in {source for source, _ in samples(after, 101, 300)}
    assert after.train.schedule.starts == [0, 101, 300]
    for number, dataset in enumerate(after.train.datasets):
        served = [tokens for source, tokens in samples(after, 0, 600) if source == number]
        assert served == [dataset[i]["tokens"].tolist() for i in range(len(served))]


def test_resume_accepts_only_phases_that_start_later(mixture, tmp_path):
    before = saved(plan(mixture))
    rewritten(mixture, "phases: []", "phases: [{from_sample: 150, weights: {c: 0}}]")
    after = plan(mixture).record
    refuse_changed_data(before, after, 150)
    with pytest.raises(DataError, match=r"first 151 samples(.|\n)*phase 1: no such phase then, from sample 150"):
        refuse_changed_data(before, after, 151)


def test_source_with_weight_zero_changes_nothing(mixture, tmp_path):
    before = plan(mixture)
    write_shard(tmp_path / "d/one", 30_000, 500)
    phase = "phases: [{from_sample: 80, weights: {d: 2}}]\nsources:\n- {name: d, shards: d, weight: 0}\n"
    rewritten(mixture, "phases: []\nsources:\n", phase)
    after = plan(mixture)
    refuse_changed_data(saved(before), after.record, 80)
    tokens = [[t for _, t in samples(p, 0, 80)] for p in (before, after)]
    assert tokens[0] == tokens[1]
    assert any(source == 0 for source, _ in samples(after, 80, 160))


def test_changed_content_is_refused_by_name(mixture, tmp_path):
    before = saved(plan(mixture))
    write_shard(tmp_path / "a/two", 5000, 503)  # same size, other tokens
    write_shard(tmp_path / "b/two", 40_000, 50)
    (tmp_path / "c/one.bin").unlink()
    (tmp_path / "c/one.idx").unlink()
    (tmp_path / "c/one.manifest.json").unlink()
    write_shard(tmp_path / "c/new", 50_000, 90)
    after = plan(mixture)
    with pytest.raises(DataError) as error:
        refuse_changed_data(before, after.record, 10)
    message = str(error.value)
    for line in (
        f"source 'a': 1 shards changed: {tmp_path}/a/two (503 tokens)",
        f"source 'b': 1 shards new: {tmp_path}/b/two",
        f"source 'c': 1 shards gone: {tmp_path}/c/one",
        f"source 'c': 1 shards new: {tmp_path}/c/new",
    ):
        assert line in message
    refuse_changed_data(before, after.record, 0)  # nothing was read yet


def test_changed_content_without_shards_is_refused():
    """Synthetic sources have a fingerprint and no files."""
    config = DataConfig(kind="synthetic", sequence_length=16)
    before, after = (build(config, vocab_size=vocab, total_samples=10) for vocab in (512, 256))
    with pytest.raises(DataError, match=r"'synthetic_0': .*of 512 letters then, .*of 256 letters now"):
        refuse_changed_data(saved(before), after.record, 1)
    refuse_changed_data(saved(before), before.record, 1)


@pytest.mark.parametrize("key, value", [("seed", 7), ("sequence_length", 8)])
def test_another_seed_or_length_is_refused(mixture, key, value):
    with pytest.raises(DataError, match=f"{key}: .* then, {value} now"):
        refuse_changed_data(saved(plan(mixture)), plan(mixture, **{key: value}).record, 1)


def test_a_plan_beyond_max_epochs_is_refused(mixture):
    rewritten(mixture, "name: c", "name: c\n  max_epochs: 2")
    plan(mixture, total_samples=70)
    with pytest.raises(DataError, match=r"'c'.*max_epochs is 2"):
        plan(mixture, total_samples=200)


def test_a_run_without_a_sample_is_refused(mixture):
    with pytest.raises(DataError, match=r"a run of 0 samples reads nothing: training\.tokens is too small"):
        plan(mixture, total_samples=0)


def test_reset_at_a_token_inside_documents_is_refused(mixture):
    eod = find_shards(next(mixture.parent.rglob("*.idx")).parent)[0].manifest.eod_id
    for right in (None, eod):
        build(data_config(mixture), vocab_size=VOCAB, total_samples=10, eod_reset=right)
    with pytest.raises(MixtureError, match=rf"end with token {eod}. Set model.eod_reset={eod}"):
        build(data_config(mixture), vocab_size=VOCAB, total_samples=10, eod_reset=eod + 1)


def test_a_vocabulary_larger_than_the_models_is_refused(mixture):
    with pytest.raises(MixtureError, match=r"vocabulary of 1073741824, the model has 512: set model.vocab_size"):
        build(data_config(mixture), vocab_size=512, total_samples=10)


def test_two_tokenizers_in_one_mixture_are_refused(mixture, tmp_path):
    write_shard(tmp_path / "b/two", 40_000, 50, tokenizer="b" * 64)
    with pytest.raises(MixtureError, match=r"'b'.*another tokenizer"):
        plan(mixture)


def test_repeated_validation_shard_has_no_epochs(tmp_path):
    write_shard(tmp_path / "one", 0, 700)
    write_shard(tmp_path / "two", 1000, 700)
    for name in ("held", "copy"):
        write_shard(tmp_path / name, 2000, 100)
    sources = [
        {"name": "a", "shards": "one", "validation": "held"},
        {"name": "b", "shards": "two", "validation": "copy"},
    ]
    with pytest.raises(MixtureError, match=r"holds the same tokens as .*: remove one$"):
        plan(write_mixture(tmp_path, sources))


def test_the_same_text_under_two_names_is_refused(mixture, tmp_path):
    write_shard(tmp_path / "b/copy", 10_000, 700)
    with pytest.raises(MixtureError, match=r"the same tokens as .*raise its weight"):
        plan(mixture)


def test_single_source_causes_no_warning(tmp_path, caplog):
    write_shard(tmp_path / "a/one", 0, 1000)
    data = plan(write_mixture(tmp_path, [{"name": "a", "shards": "a"}]), total_samples=62)
    read = [token for _, tokens in samples(data, 0, 62) for token in tokens]
    assert len(read) == len(set(read)) == 992  # 1000 minus a tail of 8
    assert not caplog.records


def test_torch_s_data_loaders_read_it(mixture):
    data = plan(mixture, total_samples=10).train
    loader = torch.utils.data.DataLoader(data, batch_size=5)
    ours = list(BatchStream(data, global_batch=5, micro_batch=5, workers=2, stop_sample=10))
    for theirs, batch in zip(loader, ours, strict=True):
        assert torch.equal(theirs["tokens"], batch["tokens"])
        assert torch.equal(theirs["dataset_id"], batch["source_ids"])


def test_first_tokens_of_documents_can_be_masked(tmp_path):
    write_shard(tmp_path / "a", 0, 400)
    write_mixture(tmp_path, [{"name": "a", "shards": "a", "validation": []}])
    config = data_config(tmp_path / "mixture.yaml", mask_first_token=True)
    plan = build(config, vocab_size=VOCAB, total_samples=25)
    rows = [plan.train[i] for i in range(25)]
    tokens, counts = (torch.cat([row[key] for row in rows]) for key in ("tokens", "loss_mask"))
    assert torch.equal(counts == 0, tokens == 0) and (tokens == 0).sum() == 1  # 0 is these shards' EOD
    without = build(data_config(tmp_path / "mixture.yaml"), vocab_size=VOCAB, total_samples=25)
    assert without.train[0]["loss_mask"].all() and without.fingerprint == plan.fingerprint


def test_masked_first_tokens_need_documents():
    with pytest.raises(DataError, match="synthetic data has no documents"):
        build(DataConfig(mask_first_token=True), vocab_size=64, total_samples=1)


def test_longer_than_planned_matches_a_longer_plan(tmp_path):
    """So a run that rewinds past a range need not open its data again."""
    config = data_config(three_sources(tmp_path))
    short, long = (build(config, vocab_size=2**30, total_samples=samples) for samples in (20, 200))
    assert short.fingerprint == long.fingerprint
    for sample in range(15, 200, 7):
        assert torch.equal(short.train[sample]["tokens"], long.train[sample]["tokens"])
