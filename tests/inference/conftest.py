import pytest
import torch

from megatron_blackmamba.inference import Decoder
from megatron_blackmamba.inference.weights import pack
from tests.reference import Tiny, tiny
from tests.reference.canonical import canonical


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session", params=["silu", "gelu", "resetting"])
def model(request) -> Tiny:
    """`resetting` is a model whose state restarts after token 0."""
    return tiny("silu", eod_reset=0) if request.param == "resetting" else tiny(request.param)


@pytest.fixture(scope="session")
def decoder(model) -> Decoder:
    return Decoder(pack(canonical(model), torch.float32))
