"""`python -m megatron_blackmamba.data_tools` is `blackmamba data tokenize`."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv[1:1] = ["data", "tokenize"]
    runpy.run_module("megatron_blackmamba", run_name="__main__")
