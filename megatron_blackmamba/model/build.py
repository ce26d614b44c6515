"""From a run's config and a place in the world to this rank's part of the model."""

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.model.config import to_megatron
from megatron_blackmamba.model.initialise import initialise
from megatron_blackmamba.model.language_model import LanguageModel
from megatron_blackmamba.model.sharding import declare, mark_linears
from megatron_blackmamba.model.stack import Block
from megatron_blackmamba.runtime import device
from megatron_blackmamba.runtime.process import default_float32
from megatron_blackmamba.runtime.seeding import seed_process
from megatron_blackmamba.runtime.world import World


@default_float32()
def build(config: RunConfig, world: World) -> LanguageModel:
    """Return this rank's part of the model on this process's device; without values where the device is `meta`."""
    if config.training.precision == "fp64" and device.device().type == "cuda":
        raise device.DeviceError(
            "training.precision=fp64 runs on CPUs only, and this process has a GPU."
            " Use bf16 or fp32, or hide the GPUs: CUDA_VISIBLE_DEVICES= blackmamba train ..."
        )
    if not device.is_pretended():
        seed_process(config.training.seed)
    with device.device():  # megatron-core's router names no device for its weight
        model = LanguageModel(to_megatron(config), config.data.sequence_length, pg_collection=world.groups)
    mark_linears(model)
    for name, block in model.named_modules():
        if isinstance(block, Block):
            declare(block.mixer, f"{name}.mixer", block.kind, config.model, world.groups)
    if device.device().type != "meta":
        initialise(model, config.model, config.training.seed)
    return model
