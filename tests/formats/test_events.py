import dataclasses
import json
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from megatron_blackmamba.formats import events
from megatron_blackmamba.formats.events import (
    KINDS,
    Branched,
    NotFinite,
    NotRewound,
    NotSaved,
    Resumed,
    Rewound,
    Saved,
    Spike,
    Started,
    read_events,
)
from megatron_blackmamba.formats.lasting_events import lasting_starts, still_valid

TIME = datetime(2026, 1, 31, 12, tzinfo=timezone(timedelta(hours=1)))
DOCS = Path(__file__).resolve().parents[2] / "docs" / "records.md"
VALUES = {int: 7, str: "text", float: 1.5, bool: True, events.Samples: [[0, 15]], Sequence[str]: ["text"]}


def shipped():
    return [kind for kind in KINDS.values() if kind.__module__ == events.__name__]


def example(kind):
    missing = dataclasses.MISSING
    required = [each for each in dataclasses.fields(kind) if each.default is each.default_factory is missing]
    return kind(step=3, **{field.name: VALUES[field.type] for field in required})


@pytest.mark.parametrize("kind", shipped(), ids=lambda kind: kind.kind)
def test_every_kind_is_read_back(tmp_path, kind):
    event = example(kind)
    (tmp_path / "events.jsonl").write_text(event.to_json(TIME) + "\n")
    (found,) = read_events(tmp_path / "events.jsonl")
    assert found.event == event and found.time == TIME and found.event.sentence


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (NotRewound(step=9), "no checkpoint to rewind to yet"),
        (NotRewound(step=9, checkpoint=5, times=2), "to step 5 2 times (training.guard.max_spikes), and that did not"),
        (
            NotRewound(step=9, checkpoint=5, times=2, new_level=True),
            "a new level of the loss, and the next steps count",
        ),
        (NotSaved(step=9, problem="NaN", retried=False), "NaN; a run cannot continue from such weights; there is none"),
        (
            NotSaved(step=9, problem="full", disk="0 GB", newest=5),
            "(full; 0 GB); the one of step 5 stays, and the save",
        ),
    ],
)
def test_what_went_wrong_is_told_with_what_follows(event, said):
    assert said in event.text


def test_a_line_starts_with_time_step_and_kind():
    line = json.loads(NotSaved(step=5, problem="the disk is full").to_json(TIME))
    assert list(line)[:3] == ["time", "step", "kind"] and line["kind"] == "not_saved"
    assert datetime.fromisoformat(line["time"]) == TIME and line["problem"] == "the disk is full"


def test_unknown_kinds_and_damaged_lines_are_skipped(tmp_path):
    path = tmp_path / "events.jsonl"
    saved = Saved(step=5).to_json(TIME)
    newer = [saved.replace("saved", "teleported"), saved.replace('"step": 5', '"step": "5"'), "{", "[]", "\0"]
    resumed = '{"time": "2026-01-31T12:00:00+00:00", "step": 5, "kind": "resumed"}'  # without its fields
    path.write_text("\n".join([*newer, resumed, saved.replace("}", ', "more": 1}'), saved[:-2]]))
    assert [found.event for found in read_events(path)] == [Saved(step=5)]
    assert list(read_events(tmp_path / "none")) == []


def test_fields_with_a_former_name_are_read(tmp_path):
    path = tmp_path / "events.jsonl"
    rewound = Rewound(step=6, to=5, passed_over=[[16, 31]])
    path.write_text(rewound.to_json(TIME).replace("passed_over", "skipped") + "\n")
    assert [found.event for found in read_events(path)] == [rewound]


def test_repeated_steps_leave_one_event():
    bad = [Spike(step=step, reason="a spike", action="skip", samples=[]) for step in (3, 5, 6)]
    resumed = Resumed(step=4, sample=64, steps_left=9, tokens_per_step=1024)
    late = NotFinite(step=6, reason="the loss is nan", action="rewind", samples=[])
    happened = [*bad, Saved(step=5), resumed, bad[1], late, Rewound(step=6, to=5)]
    assert [event.step for event in still_valid(happened) if event.repeats] == [3, 5]


def test_start_over_leaves_no_earlier_step():
    spike = Spike(step=3, reason="a spike", action="warn", samples=[])
    started = Started(step=0, steps=9, tokens_per_step=1024)
    assert still_valid([started, spike, started, spike]) == [started, started, spike]


def test_a_resume_replaces_resumes_alone():
    begun = {"sample": 0, "steps_left": 9, "tokens_per_step": 1}
    branched = Branched(step=8, trunk="runs/trunk/checkpoints/step_00000008", consumed_samples=0, **begun)
    first, later, again = (Resumed(step=step, **begun) for step in (8, 12, 10))
    assert lasting_starts([Started(step=0, steps=9, tokens_per_step=1), branched, first]) == [branched, first]
    assert lasting_starts([branched, first, later, Saved(step=14), again]) == [branched, first, again]


def test_docs_list_exactly_the_kinds():
    table = DOCS.read_text().split("| Kind | Fields |")[1].split("\n\n")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines()[2:]]
    listed = {kind.strip(" `"): [name.strip(" `") for name in names.split(",") if name.strip()] for kind, names in rows}
    fields = {kind.kind: [field.name for field in dataclasses.fields(kind)][1:] for kind in shipped()}
    assert listed == fields
