"""The entry point of `blackmamba` and `python -m megatron_blackmamba`.

SIGINT is blocked before the first import that takes time. It stays pending until `interrupts.watch()` takes it.
"""

import _signal  # built in; `signal` takes longer to import than all that comes before

_signal.pthread_sigmask(_signal.SIG_BLOCK, {_signal.SIGINT})

from megatron_blackmamba.console import interrupts  # noqa: E402


def main() -> None:
    """Run the command line. Training holds signals first: the imports take seconds, and none may kill it meanwhile."""
    interrupts.watch()
    import faulthandler
    import gc
    import sys

    if sys.__stderr__ is not None:
        faulthandler.enable()  # no end without a word, such as SIGBUS from a mapped file on a failing disk
    gc.set_threshold(*gc.get_threshold()[:2], 100)  # what imports make stays: looking through it costs half a second
    if sys.argv[1:2] == ["train"]:
        from megatron_blackmamba.runtime.signals import hold

        hold()
    from megatron_blackmamba import cli

    cli.main()


if __name__ == "__main__":
    main()
