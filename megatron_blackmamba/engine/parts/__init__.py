"""megatron-core's classes as this project uses them, and changes to objects that megatron-core has built.

Importing this package applies the changes that come before megatron-core is used.
"""

from megatron_blackmamba.engine import changes, foreign
from megatron_blackmamba.engine.checked import EngineError

try:
    changes.install()
except EngineError:
    foreign.refuse_missing()  # says why the name is needed, and what to install
    raise
