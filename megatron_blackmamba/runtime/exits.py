"""Exit codes of a training process, and the ones after which a launcher must not restart."""

from megatron_blackmamba.console import interrupts

BAD_INPUT = 2
"""The run was refused: a wrong config, damaged data, a full disk at the start."""
GAVE_UP = 65
"""Too many bad steps in a row, or weights that cannot be continued."""
HUNG = 70
"""The watchdog ended the process."""
STOPPED_ON_REQUEST = 75
"""Stopped before its end, or before its last checkpoint was on disk: starting it again resumes."""
INTERRUPTED = interrupts.INTERRUPTED
"""Ctrl-C before there is a state to save, or a second Ctrl-C."""


def refuses(error: BaseException) -> bool:
    """Return whether an error says that a command or run was refused, as opposed to one that fails on its way."""
    return isinstance(error, ValueError) and type(error).__module__.startswith("megatron_blackmamba")


FINAL = frozenset({0, BAD_INPUT, GAVE_UP, STOPPED_ON_REQUEST, INTERRUPTED})
"""Another try would end the same way, or nobody wants one. Every other code is a crash or a hang."""
RESTARTS = 3
"""Tries after a crash or a hang, as long as no new checkpoint appears."""
