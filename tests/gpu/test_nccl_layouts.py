"""Layouts of several ranks on one GPU with NCCL, beside one process. They take minutes, so only where asked for."""

import os
from pathlib import Path

import pytest

from tests.gpu import nccl_layouts

pytestmark = pytest.mark.gpu


def test_nccl_layouts_agree_with_one_process():
    results = os.environ.get("NCCL_RESULTS")
    if not results:
        pytest.skip("set NCCL_RESULTS to a file for the results: this takes the GPU for minutes")
    arguments = ["--results", results, "--seconds", os.environ.get("NCCL_SECONDS", "600")]
    assert nccl_layouts.main(arguments) in (0, 75)
    found = nccl_layouts.Results(Path(results)).found
    assert {*found["rows"], *found["drills"]}, "nothing was compared"
