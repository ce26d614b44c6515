"""Trace the training data from steps to documents, and from documents to steps."""

import itertools
import json
import random
from collections import defaultdict
from datetime import datetime

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from megatron_blackmamba.cli import app
from megatron_blackmamba.config import load
from megatron_blackmamba.formats.events import Branched, Rewound, Spike
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.report import write_report
from megatron_blackmamba.trace import ranks
from megatron_blackmamba.trace.documents import Tracer
from megatron_blackmamba.trace.steps import Steps, TraceError
from tests.training.runs import events_of, metrics

pytestmark = pytest.mark.xdist_group("branches")


@pytest.fixture(scope="session")
def run(forks, raw, tmp_path_factory):
    """A run with a spike that it rewinds from, resumed with another batch by two ranks, over phases and epochs."""
    folder = tmp_path_factory.mktemp("traced")
    common = [
        *("data.kind=mixture", f"data.mixture={raw}/mixture.yaml", "data.sequence_length=16", "model.vocab_size=320"),
        *("training.evaluate_every=0", "checkpoint.every=10", "training.guard.spike=rewind", "parallel.expert=1"),
        *("training.guard.spike_window=8", "training.guard.spike_deviations=6", f"training.tokens={16 * 16 * 90}"),
    ]
    for count, more in (
        (1, ["training.global_batch=16", "training.stop_after_steps=35"]),
        (2, ["training.global_batch=24", "resume.allow=[training.global_batch]", "training.micro_batch=3"]),
    ):
        job = forks.run(folder, [*common, *more], trainer="Recording", ranks=count)
        assert job.wait() == [0] * count, job.output()
    return folder / "run"


@pytest.fixture(scope="session")
def run_in_parts(forks, raw, tmp_path_factory):
    """A run of four ranks, two for each sequence."""
    folder = tmp_path_factory.mktemp("parts")
    overrides = [
        *("data.kind=mixture", f"data.mixture={raw}/mixture.yaml", "data.sequence_length=16", "model.vocab_size=320"),
        *("training.evaluate_every=0", "training.global_batch=8", "training.micro_batch=2", "training.steps=3"),
        *("parallel.context=2", "parallel.expert=2"),
    ]
    job = forks.run(folder, overrides, trainer="Recording", ranks=4)
    assert job.wait() == [0] * 4, job.output()
    return folder / "run"


@pytest.fixture(scope="session")
def read(run):
    """Return the samples of each step in order, and their windows of tokens."""
    found = {}
    for record in metrics(run.parent):
        of_ranks = torch.cat([torch.load(path) for path in run.glob(f"read_{record['step']}_*.pt")])
        rows = of_ranks[of_ranks[:, 0].argsort()]
        found[record["step"]] = rows[:, 0].tolist(), rows[:, 1:].numpy()
    return found


def test_a_trace_equals_the_tokens_training_read(run, read):
    tracer = Tracer(run)
    (rewound,) = events_of(run.parent, Rewound)
    (first, last) = rewound.passed_over[0]
    traced, epochs = 0, set()
    for step, (samples, windows) in read.items():
        assert tracer.steps.samples_of(step) == samples
        assert not {*samples} & {*range(first, last + 1)}
        for sample, window in zip(samples, windows, strict=True):
            pieces = list(tracer.pieces(sample))
            assert np.array_equal(np.concatenate([piece.ids for piece in pieces]), window)
            source, within = tracer.plan.train.schedule.locate(sample)
            epochs.add(within // tracer.plan.train.datasets[source].windows)
            traced += 1
    assert traced >= 1000 and max(epochs) >= 2 and {len(samples) for samples, _ in read.values()} == {16, 24}


def test_a_traced_piece_is_in_its_raw_record(run, read, raw):
    tracer = Tracer(run)
    records = {path.name: path.read_text().splitlines() for path in raw.glob("*.jsonl")}
    for sample in random.Random(1).sample([n for samples, _ in read.values() for n in samples], 200):
        for piece in tracer.pieces(sample):
            text = json.loads(records[piece.origin.source][piece.origin.record - 1])["text"]
            assert tracer.text(piece) in text


def test_a_document_s_readings_match_every_step(run, read):
    tracer = Tracer(run)
    expected = defaultdict(list)
    for step, (samples, _) in read.items():
        for sample in samples:
            for piece in tracer.pieces(sample):
                key = piece.origin.source, piece.origin.record
                expected[key].append((sample, step, piece.first_token, len(piece.ids)))
    for key in random.Random(2).sample(sorted(expected), 60):
        readings = [(each.sample, each.step, each.first_token, each.tokens) for each in tracer.readings(*key)]
        assert sorted(readings) == sorted(expected[key]), key


def test_the_command_prints_step_and_document(run, read):
    step = 50
    samples, windows = read[step]
    printed = CliRunner().invoke(app, ["data", "trace", str(run), "--step", str(step), "--sample", "3", "--json"])
    (shown,) = json.loads(printed.stdout)["samples"]
    assert shown["sample"] == samples[3]
    assert [i for each in shown["documents"] for i in each["ids"]] == windows[3].tolist()
    first = shown["documents"][0]
    where = f"{first['file']}:{first['record']}"
    printed = CliRunner().invoke(app, ["data", "trace", str(run), "--document", where])
    assert f"step {step}, sample {samples[3]}, epoch " in printed.stdout
    printed = CliRunner().invoke(app, ["data", "trace", str(run), "--samples", f"{samples[0]}-{samples[1]}"])
    assert f"=== sample {samples[0]}: " in printed.stdout
    printed = CliRunner().invoke(app, ["data", "trace", str(run), "--step", str(step), "--sample", "3", "--chars", "5"])
    longest = max((each["text"] for each in shown["documents"]), key=len)
    assert f"\n{longest[:5]} [...]\n" in printed.stdout and longest not in printed.stdout


@pytest.mark.parametrize("rank", range(4))
def test_rank_s_trace_equals_the_tokens_it_read(run_in_parts, rank):
    words = ["data", "trace", str(run_in_parts), "--step", "3", "--rank", str(rank), "--json"]
    printed = CliRunner().invoke(app, words)
    assert printed.exit_code == 0, printed.exception
    traced = [
        [each["sample"], *(i for piece in each["documents"] for i in piece["ids"])]
        for each in json.loads(printed.stdout)["samples"]
    ]
    assert traced == torch.load(run_in_parts / f"read_3_{rank}.pt").tolist()
    named = CliRunner().invoke(app, [*words, "--layout", "cp2,ep2", "--processes", "4"])
    assert named.stdout == printed.stdout


def test_ranks_of_another_layout_share_a_batch(run):
    tracer, read, size, places = Tracer(run), [], 16, []
    samples = tracer.steps.samples_of(50)
    for rank in range(8):
        share = ranks.share_of(tracer.config, samples, rank, ranks.parse_layout("tp2,ep2,cp2"), 8, 3)
        read += [(sample, place) for sample, _ in share.numbered() for place in range(size)[share.here]]
        places.append(share.place)
    assert sorted(read) == sorted(2 * [(sample, place) for sample in samples for place in range(size)])  # two by TP
    counted = [{"tensor": t, "context": c, "data": d} for d, c, t in itertools.product(range(2), repeat=3)]
    assert places == counted


def test_a_step_has_the_layout_of_its_job(run, tmp_path):
    config = Tracer(run).config
    changes = ["parallel.tensor: 1 from step 5 on, 2 before", "parallel.tensor: 4 from step 9 on, 1 before; routes"]
    kinds = [("started", 0, 4, None), ("resumed", 4, 2, changes[0]), ("resumed", 8, 8, changes[1])]
    more = {"steps": 20, "sample": 0, "steps_left": 9, "tokens_per_step": 1}
    lines = [
        {"time": "2026-11-27T10:00:00+00:00", "step": step, "kind": kind, "processes": processes, **more}
        | ({"changes": [change]} if change else {})
        for kind, step, processes, change in kinds
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    jobs = [ranks.job_at(tmp_path, config, step) for step in (4, 5, 8, 9)]
    found = [(job.parallel.tensor, job.processes) for job in jobs]
    assert found == [(2, 4), (1, 2), (1, 2), (config.parallel.tensor, 8)]


def test_an_earlier_resume_replaces_a_later_one(tmp_path):
    """The checkpoint of step 10 was damaged, so steps 6 to 10 were taken again, with the new micro-batch."""
    more = {"time": "2026-11-27T10:00:00+00:00", "kind": "resumed", "tokens_per_step": 1, "sample": 0, "steps_left": 9}
    changes = {step: [f"training.micro_batch: 2 from step {step + 1} on, 1 before"] for step in (10, 5)}
    lines = [{**more, "step": step, "processes": step, "changes": change} for step, change in changes.items()]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    jobs = [ranks.job_at(tmp_path, load("tiny", ["training.micro_batch=2"]), step) for step in (5, 6, 10, 11)]
    assert [(job.micro_batch, job.processes) for job in jobs] == [(1, None), (2, 5), (2, 5), (2, 5)]


@pytest.mark.parametrize("axis", ["tensor", "context", "pipeline", "data"])
def test_a_place_names_only_groups_of_several(run, axis):
    layout = {"tensor": "tp2", "context": "cp2", "pipeline": "pp2", "data": "tp1"}[axis]
    tracer = Tracer(run)
    share = ranks.share_of(tracer.config, tracer.steps.samples_of(50), 1, ranks.parse_layout(layout), 2, 4)
    assert share.place == {axis: 1}


def test_ranks_have_the_micro_batch_of_their_step(run):
    """The run was resumed with another one: rank 1 of two read every second micro-batch, of 4 and then of 3 rows."""
    config = Tracer(run).config
    before, after = (ranks.job_at(run, config, step).micro_batch for step in (35, 36))
    assert (before, after) == (4, config.training.micro_batch)
    words = ["data", "trace", str(run), "--step", "35", "--rank", "1", "--layout", "tp1", "--processes", "2", "--json"]
    told = json.loads(CliRunner().invoke(app, words, catch_exceptions=False).stdout)
    samples = Tracer(run).steps.samples_of(35)
    expected = [n for first in range(before, 16, 2 * before) for n in samples[first : first + before]]
    assert sorted({each["sample"] for each in told["samples"]}) == sorted(expected)


def test_the_report_names_the_trace_of_a_spike(run):
    (spike,) = events_of(run.parent, Spike)
    first, last = spike.samples[0]
    command = f"blackmamba data trace {run} --samples {first}-{last}"
    assert command in write_report(run).read_text()
    tracer = Tracer(run)
    assert all(list(tracer.pieces(sample)) for sample in range(first, last + 1))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--step", "9999"], "step 9999 is not in metrics.jsonl, which has steps 1 to"),
        ([], "name one of --step N"),
        (["--step", "1", "--sample", "16"], "the batch has 16 samples"),
        (["--step", "1", "--rank", "1"], "--rank 1: the last of 1 is rank 0. Add --processes"),
        (["--step", "50", "--rank", "2"], "--rank 2: the last of 2 is rank 1. Add --processes"),
        (["--samples", "1-2", "--rank", "0"], "name its step"),
        (["--step", "1", "--layout", "tp2"], "name it with --rank N"),
        (["--step", "1", "--rank", "0", "--layout", "dp2"], "'dp2' is none of tpN, ppN, cpN, epN, etpN"),
        (["--step", "1", "--rank", "0", "--layout", "tp2", "--processes", "3"], "3 processes"),
        (["--samples", "9-3"], "give a first and a last sample"),
        (["--samples", "8-99999"], "sample 99999 has not been read: the run has read samples 0 to "),
        (["--document", "web.jsonl:8"], "the file has no such record, or it was skipped"),
        (["--document", "other.jsonl:1"], "has no such raw file"),
        (["--document", "web.jsonl"], "give a raw file and a record"),
        (["--document", "held.jsonl:2"], "it is in the validation set of source 'web'"),
    ],
)
def test_a_trace_that_cannot_be_is_refused(run, arguments, message):
    refused = CliRunner().invoke(app, ["data", "trace", str(run), *arguments])
    assert message in str(refused.exception)


def test_changed_data_is_not_traced(run, raw, tmp_path):
    copy = tmp_path / "run"
    copy.mkdir()
    for path in (RunFolder(run).config, RunFolder(run).metrics, RunFolder(run).events):
        (copy / path.name).write_bytes(path.read_bytes())
    plan = json.loads(RunFolder(run).data_plan.read_bytes())
    plan["seed"] += 1
    RunFolder(copy).data_plan.write_text(json.dumps(plan))
    with pytest.raises(ValueError, match="the data differs from what this run read"):
        Tracer(copy)


def test_samples_of_a_discarded_spike_can_be_traced():
    records = [{"step": 1, "next_sample": 16, "consumed_samples": 16}]
    spike = Spike(step=3, reason="a spike", action="rewind", samples=[(32, 47)])
    Steps(records, [spike]).refuse_unread(range(32, 48))
    with pytest.raises(TraceError, match="sample 48 has not been read: the run has read samples 0 to 47 so far"):
        Steps(records, [spike]).refuse_unread([48])
    with pytest.raises(TraceError, match="sample 0 has not been read: the run has read no sample so far"):
        Steps([], []).refuse_unread([0])


def test_records_without_skipped_ranges_are_refused():
    records = [
        {"step": 1, "next_sample": 16, "consumed_samples": 16},
        {"step": 2, "next_sample": 48, "consumed_samples": 32},
    ]
    assert Steps(records, [Rewound(step=3, to=1, passed_over=[(16, 31)])]).samples_of(2) == list(range(32, 48))
    with pytest.raises(TraceError, match=r"does not say which"):
        Steps(records, []).samples_of(2)
    with pytest.raises(TraceError, match="an older version wrote it"):
        Steps([{"step": 1}], [])


def write_run(folder, ends, *events):
    """Write the records of steps of 16 samples, by step and next sample."""
    folder.mkdir()
    records = [{"step": step, "next_sample": end, "consumed_samples": 16 * step} for step, end in ends.items()]
    RunFolder(folder).metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    RunFolder(folder).events.write_text("".join(event.to_json(datetime.now()) + "\n" for event in events))
    return folder


def branched(trunk, sample=32):
    at = {"trunk": f"{trunk}/checkpoints/step_2", "step": 2, "sample": sample, "consumed_samples": 32}
    return Branched(**at, steps_left=1, tokens_per_step=1)


def test_later_rewinds_of_a_trunk_are_left_out(tmp_path):
    spike = Spike(step=9, reason="a spike", action="rewind", samples=[(400, 415)])
    passed_over = [Rewound(step=2, to=0, passed_over=[(0, 3)]), Rewound(step=3, to=2, passed_over=[(32, 63)])]
    trunk = write_run(tmp_path / "trunk", {1: 20, 2: 36, 3: 84}, *passed_over, spike)
    branch = write_run(tmp_path / "branch", {3: 68}, branched(trunk, 36), Rewound(step=3, to=2, passed_over=[(36, 51)]))
    steps = Steps.of_run(branch)
    assert [steps.samples_of(step) for step in (1, 3)] == [[*range(4, 20)], [*range(52, 68)]]
    with pytest.raises(TraceError, match="sample 400 has not been read"):
        steps.refuse_unread([400])


def test_trunks_in_a_circle_are_traced(tmp_path):
    one = write_run(tmp_path / "one", {3: 48}, branched(tmp_path / "two"))
    write_run(tmp_path / "two", {3: 48}, branched(one))
    assert Steps.of_run(one).samples_of(3) == [*range(32, 48)]
