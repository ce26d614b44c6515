"""Tests that need a CUDA device and are skipped without one."""

import pytest
import torch


@pytest.fixture(autouse=True)
def cuda():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda")
