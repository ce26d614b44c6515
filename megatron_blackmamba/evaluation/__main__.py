"""lm-eval's own command line, `python -m megatron_blackmamba.evaluation`, with the model `blackmamba`."""

from megatron_blackmamba.console import interrupts

if __name__ == "__main__":
    interrupts.watch()
    from lm_eval.__main__ import cli_evaluate

    from megatron_blackmamba.evaluation import harness  # noqa: F401  registers the model

    cli_evaluate()
