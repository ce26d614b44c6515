import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from megatron_blackmamba.ops import library
from tests.ops.implementations import CPP, ISAS, implementation


@pytest.mark.skipif(not ISAS, reason="the C++ kernels are not built")
def test_best_instruction_set_is_the_default(monkeypatch):
    monkeypatch.delenv("BLACKMAMBA_ISA", raising=False)
    assert library.isa() == library.runnable_isas()[-1]
    monkeypatch.setenv("BLACKMAMBA_ISA", "plain")
    assert library.isa() == "plain"
    monkeypatch.setenv("BLACKMAMBA_ISA", "mmx")
    with pytest.raises(ValueError, match="BLACKMAMBA_ISA=mmx: this machine runs plain"):
        library.isa()


def test_every_kernel_is_tested_for_every_instruction_set():
    sources = library.SOURCES.glob("*.cpp")
    kernels = {source.stem for source in sources if '"simd.h"' in source.read_text()} - {"probe"}  # a benchmark's
    tests = Path(__file__).parent
    assert len(kernels) > 6
    assert [k for k in kernels if "CPP" not in (tests / f"test_{k}.py").read_text()] == []
    assert [param.values[0] for param in CPP] == [f"cpp-{isa}" for isa in library.ISAS]


def test_without_the_library_everything_still_runs(tmp_path):
    """As after an installation without a C++ compiler."""
    script = f"""
import pathlib, torch
from megatron_blackmamba.ops import library
library.LIBRARY = pathlib.Path({str(tmp_path / "missing.so")!r})
from megatron_blackmamba.ops import causal_conv1d, selective_scan
from megatron_blackmamba.ops.matvec import matvec
assert "not built" in selective_scan.available_backends()["cpp"]
assert "not built" in causal_conv1d.available_backends()["cpp"]
u, BC = torch.randn(1, 5, 4), torch.randn(1, 5, 2)
y = selective_scan.selective_scan(u, u, -torch.ones(4, 2), BC, BC)
y = causal_conv1d.causal_conv1d(y, torch.randn(4, 4))
print(matvec(torch.randn(3, 4), y[0]).shape)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0 and "torch.Size([5, 3])" in done.stdout, done.stderr


@pytest.mark.skipif(not ISAS, reason="the C++ kernels are not built")
def test_a_library_of_other_sources_is_not_used(tmp_path, monkeypatch):
    """As after a `git pull` without a new build: its structures may be others, a symbol may be missing."""
    assert library.unavailable() is None
    (tmp_path / "scan.cpp").write_text("// another day's")
    monkeypatch.setattr(library, "SOURCES", tmp_path)
    with pytest.warns(UserWarning, match="several times slower"):
        assert "run `make install`" in library.unavailable.__wrapped__()


def test_tensor_on_another_device_is_refused():
    with pytest.raises(ValueError, match="weight is on meta"):
        library.Arguments(weight=torch.empty(2, device="meta"))


@pytest.mark.parametrize("name", CPP)
def test_a_kernel_runs_after_a_fork(name, monkeypatch):
    """Data loaders fork: threads that a kernel had started before must not be waited for after."""
    monkeypatch.setenv("BLACKMAMBA_ISA", name.partition("-")[2])
    from megatron_blackmamba.ops.matvec import matvec

    weight, x = torch.ones(1000, 2100), torch.ones(1, 2100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert matvec(weight, x)[0, 0] == 2100
    child = os.fork()
    if child == 0:
        os._exit(0 if matvec(weight, x)[0, 999] == 2100 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("name", CPP[-1:])
def test_callers_in_several_threads_get_their_own_results(name):
    """There is one set of helpers: who finds them busy must not wait for them, nor give them a second task."""
    from megatron_blackmamba.ops.matvec import matvec

    weight = torch.randn(700, 1100)
    x_N = torch.randn(4, 60, 1100)
    with implementation(name), ThreadPoolExecutor(4) as callers:
        answers = callers.map(lambda xs: torch.cat([matvec(weight, x[None], threads=3) for x in xs]), x_N)
        for x, y in zip(x_N, answers, strict=True):
            torch.testing.assert_close(y, x @ weight.t(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", CPP[-1:])
def test_helpers_that_went_to_sleep_wake_up(name):
    from megatron_blackmamba.ops.matvec import matvec

    weight, x = torch.ones(1000, 2100), torch.ones(1, 2100)
    with implementation(name):
        for pause in (0, 1e-5, 1e-4, 1e-3, 1e-2) * 10:
            time.sleep(pause)
            assert (matvec(weight, x, threads=4) == 2100).all()
