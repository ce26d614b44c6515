"""Where a process lives: its device, its place among the others, its random numbers, and how it is asked to stop.

Importing this package loads neither torch nor megatron-core; its modules do.
"""
