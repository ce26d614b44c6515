"""`python -m megatron_blackmamba.data_tools` is `blackmamba data tokenize`."""

from megatron_blackmamba.data_tools.commands import run_tokenize

if __name__ == "__main__":
    run_tokenize()
