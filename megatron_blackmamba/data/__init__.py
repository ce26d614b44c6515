"""The training data: sources, their epochs, their mixture, and the batches of a rank."""

from megatron_blackmamba.data.batches import Batch, BatchStream
from megatron_blackmamba.data.changes import refuse_changed_data
from megatron_blackmamba.data.datasets import DataError
from megatron_blackmamba.data.integrity import ShardCheck
from megatron_blackmamba.data.plan import DataPlan, build
