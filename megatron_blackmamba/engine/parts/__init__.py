"""megatron-core's classes as this project uses them, and changes to objects that megatron-core has built.

Importing this package applies the changes that come before megatron-core is used.
"""

from megatron_blackmamba.engine import changes
from megatron_blackmamba.engine.checked import replace

changes.install()

__all__ = ["replace"]
