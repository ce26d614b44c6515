import pytest

from megatron_blackmamba import model
from megatron_blackmamba.config import ParallelConfig, load
from megatron_blackmamba.runtime import world


@pytest.fixture(scope="module")
def place():
    yield world.start(ParallelConfig())
    world.shutdown()


@pytest.fixture(scope="module")
def build(place):
    """Builds the tiny run's model with overrides, in this process."""

    def built(*overrides):
        return model.build(load("tiny", overrides), place)

    return built
