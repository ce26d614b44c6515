"""BlackMamba as megatron-core modules: `build` gives a rank's part of the model, with its initial weights."""

from megatron_blackmamba.runtime import patches

patches.install()  # before megatron-core is imported

from megatron_blackmamba.model.bias_update import remind_of_expert_bias, update_expert_bias  # noqa: E402
from megatron_blackmamba.model.build import build  # noqa: E402
from megatron_blackmamba.model.config import to_megatron  # noqa: E402
from megatron_blackmamba.model.language_model import LanguageModel  # noqa: E402

__all__ = ["LanguageModel", "build", "remind_of_expert_bias", "to_megatron", "update_expert_bias"]
