"""Check that the data equals what a run has read so far, and describe any differences."""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from megatron_blackmamba.data.datasets import DataError

Record = Mapping[str, Any]
_SHOWN = 3


def refuse_changed_data(saved: Record, current: Record, position: int) -> None:
    """Raise DataError if any sample before `position` would not be what it was. What comes later may change (phases,
    new sources, the length of the run), and so may paths and file names: content is what counts."""
    different = differences(saved, current, position)
    if different:
        weights = any(line.startswith("phase ") for line in different)
        change = "change weights by" if weights else "add the new data as a source of weight 0 with"
        raise DataError(
            f"the data differs from what this run read in its first {position} samples:\n  "
            + "\n  ".join(different)
            + f"\nRestore it; or {change} a phase that starts at sample {position} or later; "
            "or start a new run from these weights (start.from=CHECKPOINT)."
        )


def differences(saved: Record, current: Record, position: int) -> list[str]:
    """Return one line for each difference that changes a sample before `position`."""
    lines = [
        f"{key}: {saved.get(key)} then, {current.get(key)} now"
        for key in ("version", "kind", "seed", "sequence_length")
        if saved.get(key) != current.get(key)
    ]
    if lines or position == 0:
        return lines if position else []
    before, now = _phases_before(saved, position), _phases_before(current, position)
    for number in range(max(len(before), len(now))):
        lines += _phase_difference(number, before[number : number + 1], now[number : number + 1])
    used = {name for phase in before for name in phase["shares"]}
    then, today = ({source["name"]: source for source in record["sources"]} for record in (saved, current))
    for name in sorted(used):
        if name not in today:
            lines.append(f"source {name!r} is gone")
        elif then[name]["fingerprint"] != today[name]["fingerprint"]:
            lines += _content_difference(then[name], today[name])
        elif (was := _read(saved, then[name])) != (now_read := _read(current, today[name])):
            lines.append(f"source {name!r}: earlier runs have read {was} then, {now_read} now")
    return lines


def _read(record: Record, source: Record) -> str:
    reads = record.get("read_before", {}).get(source["fingerprint"], ())
    return ", ".join(f"{read['samples']} × {read['sequence_length']} tokens" for read in reads) or "nothing"


def _phases_before(record: Record, position: int) -> list[Record]:
    return [
        {"from_sample": phase["from_sample"], "shares": {k: v for k, v in phase["shares"].items() if v != "0"}}
        for phase in record["phases"]
        if phase["from_sample"] < position
    ]


def _phase_difference(number: int, before: list[Record], now: list[Record]) -> list[str]:
    if before == now:
        return []
    then, today = _phase(before), _phase(now)
    if then == today:  # equal when rounded
        then, today = _phase(before, exact=True), _phase(now, exact=True)
    return [f"phase {number}: {then} then, {today} now"]


def _phase(phase: list[Record], *, exact: bool = False) -> str:
    if not phase:
        return "no such phase"
    shares = (f"{k} {v if exact else format(float(Fraction(v)), '.4g')}" for k, v in phase[0]["shares"].items())
    return f"from sample {phase[0]['from_sample']}: {', '.join(shares)}"


def _content_difference(then: Record, now: Record) -> list[str]:
    old, new = ({shard["sha256"]: shard for shard in source.get("shards", [])} for source in (then, now))
    lost = [shard for sha, shard in old.items() if sha not in new]
    came = [shard for sha, shard in new.items() if sha not in old]
    if not lost and not came:
        return [f"source {then['name']!r}: {then['fingerprint']} then, {now['fingerprint']} now"]
    changed = {shard["path"] for shard in lost} & {shard["path"] for shard in came}
    kinds = {
        "changed": [shard for shard in came if shard["path"] in changed],
        "gone": [shard for shard in lost if shard["path"] not in changed],
        "new": [shard for shard in came if shard["path"] not in changed],
    }
    return [f"source {then['name']!r}: {len(s)} shards {kind}: {_list(s)}" for kind, s in kinds.items() if s]


def _list(shards: list[Record]) -> str:
    more = f" and {len(shards) - _SHOWN} more" if len(shards) > _SHOWN else ""
    return ", ".join(f"{shard['path']} ({shard['tokens']} tokens)" for shard in shards[:_SHOWN]) + more
