"""Exit codes of a training process, and the ones after which a launcher must not restart."""

from megatron_blackmamba import interrupts

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

FINAL = frozenset({0, BAD_INPUT, GAVE_UP, STOPPED_ON_REQUEST, INTERRUPTED})
"""Another try would end the same way, or nobody wants one. Every other code is a crash or a hang."""
RESTARTS = 3
"""Tries after a crash or a hang, as long as no new checkpoint appears."""
