"""The environment of a process: its device, its rank and process groups, its random numbers, and stop requests.

Importing this package loads neither torch nor megatron-core; its modules do.
"""
