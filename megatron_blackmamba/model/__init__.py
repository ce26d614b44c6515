"""BlackMamba as megatron-core modules: `build` gives a rank's part of the model, with its initial weights."""

import megatron_blackmamba.engine.parts  # changes megatron-core before it is imported
from megatron_blackmamba.model.build import build
from megatron_blackmamba.model.config import to_megatron
from megatron_blackmamba.model.language_model import LanguageModel
from megatron_blackmamba.model.router_update import remind_of_update, update_routers
