"""`python -m megatron_blackmamba` is `blackmamba`."""

from megatron_blackmamba.cli import main

if __name__ == "__main__":
    main()
