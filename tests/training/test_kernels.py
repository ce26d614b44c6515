"""A GPU without a usable Triton: the log of a run and the doctor say loudly what replaces its kernels, and why."""

import sys

import pytest

from megatron_blackmamba.config import load
from megatron_blackmamba.launch import software
from megatron_blackmamba.ops import backends
from megatron_blackmamba.runtime.device import DeviceError
from megatron_blackmamba.training.start.kernels import in_use, refuse_lost

OPS = "megatron_blackmamba.ops"
WITH_TRITON = ("cross_entropy", "gated", "gated_norm", "rms_norm", "sinkhorn")


def missing(monkeypatch):
    for name in [name for name in sys.modules if name.startswith(OPS) and "triton" in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    return "import of triton halted"


def older(monkeypatch):
    support = pytest.importorskip("megatron_blackmamba.ops.triton_support")
    monkeypatch.setattr(support.triton, "__version__", "3.3.1")
    return "needs Triton 3.4 or newer, found 3.3.1"


@pytest.fixture(params=[missing, older])
def reason(request, monkeypatch):
    """Take a GPU for granted and Triton away; return the reason to be told."""
    known = backends.why_not, backends._load
    told = request.param(monkeypatch)
    monkeypatch.setattr(backends, "has_gpu", lambda: True)
    for function in known:
        function.cache_clear()
    yield told
    for function in known:
        function.cache_clear()


def test_a_run_starts_with_a_warning(reason):
    lines = in_use().sentence.splitlines()
    assert lines[0].startswith("WARNING: operations of PyTorch replace the Triton kernels") and reason in lines[0]
    for op in WITH_TRITON:
        assert any(line.startswith(f"  {op}: ") and "not triton: " in line and reason in line for line in lines), op


def test_run_without_its_kernels_is_refused(reason):
    with pytest.raises(DeviceError, match=r"kernels\.if_missing=pytorch") as refused:
        refuse_lost(load("tiny"))
    assert reason in str(refused.value) and "sinkhorn" in str(refused.value) and "\n" not in str(refused.value)
    refuse_lost(load("tiny", ["kernels.if_missing=pytorch"]))


def test_the_doctor_warns_with_advice(reason):
    findings = {finding.name: finding for finding in software.backends()}
    warning = findings["Triton kernels"]
    assert warning.status == "warning" and reason in warning.found and warning.advice
    for op in WITH_TRITON:
        assert reason in findings[f"{op}: triton"].found


def test_without_a_gpu_nothing_is_told(monkeypatch):
    monkeypatch.setattr(backends, "has_gpu", lambda: False)
    assert in_use() is None
    refuse_lost(load("tiny"))
    assert "Triton kernels" not in [finding.name for finding in software.backends()]
