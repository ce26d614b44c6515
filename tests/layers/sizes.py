"""The sizes that keep layers small in tests, by letter. A letter that is not here has no sizes, or small ones."""

from megatron_blackmamba import layers
from megatron_blackmamba.registry import import_extensions

import_extensions()
SIZES = {
    "M": {"model.state_size": "4"},
    "S": {"model.mamba2.head_dim": "8", "model.mamba2.state_size": "4"},
    "R": {"model.mamba3.head_dim": "8", "model.mamba3.state_size": "8"},
    "G": {"model.delta.head_dim": "8", "model.delta.key_dim": "4"},
    "E": {"model.experts": "4", "model.expert_hidden_size": "16"},
    "*": {"model.attention.heads": "4"},
    "-": {"model.mlp_hidden_size": "16"},
}
LETTERS = "".join(dict.fromkeys([*SIZES, *(kind.letter for kind in layers.all_kinds())]))
"""Those of the package, and of the modules in BLACKMAMBA_IMPORT."""
PASSING = "".join(kind.letter for kind in map(layers.kind_of, LETTERS) if kind.cut is None and kind.letter not in "E-")
"""Those whose states parallel.context passes on."""


def small(letters: str = LETTERS) -> list[str]:
    """Return the overrides of these letters."""
    return [f"{key}={value}" for letter in letters for key, value in SIZES.get(letter, {}).items()]
