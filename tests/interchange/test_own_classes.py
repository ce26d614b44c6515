"""A norm and a router with config keys of their own are exported with the class that they bring."""

import pytest

from megatron_blackmamba import norms, routers
from megatron_blackmamba.config import load
from megatron_blackmamba.hf.layers_blackmamba import FINAL_NORMS, ROUTERS
from tests.interchange.loading import assert_loads_as_trained
from tests.model.shifted_norm import ShiftedNorm
from tests.routers.first_experts import FirstExperts

NORM = ["model.final_norm=shifted_norm", "model.extensions.shifted_norm.factor=1.5"]
ROUTER = ["model.router.kind=first_experts", "model.extensions.first_experts.count=3", "model.top_k=2"]


@pytest.mark.parametrize(("kinds", "kind", "overrides"), [(norms, ShiftedNorm, NORM), (routers, FirstExperts, ROUTER)])
def test_kind_with_settings_loads_as_trained(kinds, kind, overrides, tmp_path):
    kinds.register(kind)
    try:
        assert_loads_as_trained(load("tiny", overrides), tmp_path)
    finally:
        kinds.unregister(kind.name)


@pytest.mark.parametrize(("kinds", "table"), [(norms, FINAL_NORMS), (routers, ROUTERS)])
def test_kinds_name_their_class_in_exports(kinds, table):
    named = {kind.name: kind.named("modeling") for kind in kinds.all_kinds() if kind.modeling}
    assert len(named) >= 2 and named.items() <= table.items()
