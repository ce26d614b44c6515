"""The training data: sources, their epochs, their mixture, and the batches of a rank."""

from megatron_blackmamba.runtime import patches

patches.install()  # before megatron-core is imported

from megatron_blackmamba.data.batches import Batch, BatchStream  # noqa: E402
from megatron_blackmamba.data.changes import refuse_changed_data  # noqa: E402
from megatron_blackmamba.data.datasets import DataError  # noqa: E402
from megatron_blackmamba.data.integrity import ShardCheck  # noqa: E402
from megatron_blackmamba.data.plan import DataPlan, build  # noqa: E402

__all__ = ["Batch", "BatchStream", "DataError", "DataPlan", "ShardCheck", "build", "refuse_changed_data"]
