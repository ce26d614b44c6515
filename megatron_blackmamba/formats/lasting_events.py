"""The events of a run that still hold: a resume or a rewind takes steps again, and a new start all of them."""

from collections.abc import Sequence

from megatron_blackmamba.formats.events import Branched, Event, Resumed, Rewound, Started

Start = Started | Branched | Resumed


def still_valid(events: Sequence[Event]) -> list[Event]:
    """Leave out what happened in steps that a later start or rewind repeats."""
    valid: list[Event] = []
    for event in events:
        back_to = event.step if isinstance(event, Start) else event.to if isinstance(event, Rewound) else None
        if back_to is not None:
            valid = [before for before in valid if not before.repeats or (before.step or 0) <= back_to]
        valid.append(event)
    return valid


def lasting_starts(events: Sequence[Event]) -> list[Start]:
    """Return the starts that led to the last step. A resume replaces those from the same or a later step."""
    lasting: list[Start] = []
    for start in events:
        if isinstance(start, Resumed):
            at = start.step or 0
            lasting = [before for before in lasting if not isinstance(before, Resumed) or (before.step or 0) < at]
            lasting.append(start)
        elif isinstance(start, Start):
            lasting = [start]
    return lasting
