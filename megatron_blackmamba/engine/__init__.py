"""Everything that changes megatron-core, or touches a private name of it: nothing outside this folder does.

`changes.py` lists the changes in the order in which they are applied. `cpu.py`, `everywhere.py`, `float64.py` and
`groups.py` change its modules and classes. `parts/` subclasses its classes and changes objects that it has built.
Importing this package loads neither torch nor megatron-core; importing `engine.parts` applies the changes on import.
"""
