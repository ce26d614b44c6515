"""A backend that is broken on a machine is one that is not there: the next one does the work, and doctor says why."""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest
import torch

from megatron_blackmamba import ops
from megatron_blackmamba.ops import backends, delta, library, selective_scan, ssd
from megatron_blackmamba.ops.adam import FUSED_ADAM
from megatron_blackmamba.ops.gated import gated
from megatron_blackmamba.ops.selective_scan import Inputs
from megatron_blackmamba.settings import KernelsConfig


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise ImportError('undefined symbol: _ZN2at')", "undefined symbol"),
        ("raise AttributeError('no autotune')", "fails to load: AttributeError: no autotune"),
    ],
)
def test_backend_that_cannot_be_imported_is_skipped(tmp_path, monkeypatch, body, reason):
    write_op(tmp_path, monkeypatch, "broken", body)
    assert backends.choose("an_op", ("broken", "plain"), "auto", torch.ones(1)).__name__ == "an_op.plain"
    assert reason in backends.available("an_op", ("broken", "plain"))["broken"]


@pytest.mark.parametrize("name", ["triton", "triton_narrow"])
def test_triton_kernels_load_only_where_they_run(tmp_path, monkeypatch, name):
    triton_support = pytest.importorskip("megatron_blackmamba.ops.triton_support")
    write_op(tmp_path, monkeypatch, name, "raise OSError('loaded')")
    for here, told in (("needs a CUDA device", "needs a CUDA device"), (None, "it fails to load: OSError: loaded")):
        monkeypatch.setattr(triton_support, "unavailable", lambda here=here: here)
        backends.why_not.cache_clear()
        assert backends.available("an_op", (name, "plain")) == {name: told, "plain": None}
    backends.why_not.cache_clear()


def test_a_backend_whose_smallest_call_fails_is_skipped(tmp_path, monkeypatch):
    body = "def unavailable(): return None\ndef smallest(device): raise TypeError(f'no kernel for {device}')\n"
    write_op(tmp_path, monkeypatch, "broken", body)
    assert backends.available("an_op", ("broken",)) == {"broken": None}  # without a GPU nothing is tried
    backends.why_not.cache_clear()
    monkeypatch.setattr(backends, "has_gpu", lambda: True)
    told = "its smallest call fails: TypeError: no kernel for cuda"
    assert backends.available("an_op", ("broken", "plain")) == {"broken": told, "plain": None}
    backends.why_not.cache_clear()


def forget(monkeypatch, names):
    """Let these modules be imported anew. After the test, the earlier ones are back, and its own are gone."""
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]


def mamba_ssm(tmp_path, monkeypatch, interface):
    """Install a package mamba-ssm whose scan in CUDA is this."""
    (tmp_path / "mamba_ssm/ops").mkdir(parents=True)
    (tmp_path / "mamba_ssm/ops/selective_scan_interface.py").write_text(interface)
    monkeypatch.syspath_prepend(str(tmp_path))
    inside = ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.selective_scan_interface")
    forget(monkeypatch, {*inside, *(f"megatron_blackmamba.ops.{op}.mamba_ssm" for op in ("selective_scan", "ssd"))})
    for cached in (backends.why_not, backends._load):
        cached.cache_clear()


FAILS = "def selective_scan_fn(*args, **kwargs):\n    raise RuntimeError('no kernel')\n"
WORKS = """
import torch
class Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u):
        return 2 * u, u.sum(2)
    @staticmethod
    def backward(ctx, dy, dstate):
        return 2 * dy
def selective_scan_fn(u, *args, **kwargs):
    return Scan.apply(u)
"""


@pytest.mark.parametrize(
    ("interface", "reason"),
    [
        ("selective_scan_cuda = None\n" + FAILS, "mamba-ssm was built without selective_scan_cuda"),
        ("selective_scan_cuda = 1\n" + FAILS, "its smallest call fails: RuntimeError: no kernel"),
        ("selective_scan_cuda = 1\n" + WORKS, None),
    ],
    ids=["not built", "fails", "works"],
)
def test_mamba_ssm_is_used_if_its_kernel_works(tmp_path, monkeypatch, interface, reason):
    mamba_ssm(tmp_path, monkeypatch, interface)
    monkeypatch.setattr(backends, "has_gpu", lambda: True)
    monkeypatch.setattr(backends, "TRIAL_DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    package = "megatron_blackmamba.ops.selective_scan"
    assert backends.available(package, ("mamba_ssm",))["mamba_ssm"] == reason
    if reason is None:
        x = torch.ones(1, 2, 8, requires_grad=True)
        _, state = backends._load(package, "mamba_ssm").scan(Inputs(x, x, -torch.ones(8, 16), x, x))
        with pytest.raises(RuntimeError, match="gives the final state no gradient"):
            state.sum().backward()
    for cached in (backends.why_not, backends._load):
        cached.cache_clear()


def write_op(tmp_path, monkeypatch, name, body):
    """Write the package `an_op` with a backend of this name and content, and one that always works."""
    (tmp_path / "an_op").mkdir()
    (tmp_path / "an_op/__init__.py").touch()
    (tmp_path / f"an_op/{name}.py").write_text(body)
    (tmp_path / "an_op/plain.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    forget(monkeypatch, {"an_op", "an_op.plain", f"an_op.{name}"})
    for cached in (backends.why_not, backends._load):
        cached.cache_clear()


@pytest.mark.parametrize(
    ("logits", "reason"),
    [
        (torch.ones(1, 8), None),
        (torch.ones(1, 8, dtype=torch.float64), "takes float32, bfloat16, float16; the input is float64"),
        (torch.ones(0, 8), "there are no tokens"),
        (torch.ones(4, 256), None),
        (torch.ones(4, 257), "up to 256 experts, not 257"),
    ],
)
def test_triton_router_says_what_it_cannot_take(monkeypatch, logits, reason):
    pytest.importorskip("triton")
    from megatron_blackmamba.ops.sinkhorn import Inputs, triton

    assert backends.unsupported(triton, Inputs(logits)) == "the tensors are not on a CUDA device"
    monkeypatch.setattr(backends, "interpreted", lambda: True)
    assert backends.unsupported(triton, Inputs(logits)) == reason


def test_each_op_names_its_backend_and_better_ones(monkeypatch):
    lines = dict(line.split(": ", 1) for line in backends.in_use())
    ops = {
        "selective_scan",
        "causal_conv1d",
        "sinkhorn",
        "experts",
        "gated",
        "gated_norm",
        "rms_norm",
        "cross_entropy",
        "ssd",
    }
    assert ops | {"adam", "attention"} <= set(lines)
    assert "not triton: " in lines["gated"]
    monkeypatch.setattr(backends, "has_gpu", lambda: True)
    on_gpu = dict(line.split(": ", 1) for line in backends.in_use())
    assert on_gpu["gated"].startswith("reference; not triton: ")  # kernels for CPUs take no CUDA tensors
    assert not on_gpu["selective_scan"].startswith("cpp")
    if find_spec("mamba_ssm") is None and find_spec("triton"):
        assert on_gpu["ssd"].startswith("chunked; not triton: ")
        assert on_gpu["ssd"].endswith("; not mamba_ssm: No module named 'mamba_ssm'")


def test_every_op_with_backends_has_one_form():
    for folder in (path for path in Path(ops.__file__).parent.iterdir() if (path / "__init__.py").exists()):
        op = import_module(f"{ops.__name__}.{folder.name}")
        for name in op.BACKENDS:
            assert (folder / f"{name}.py").exists(), f"{folder.name} has no {name}.py"
        assert set(op.BACKENDS) <= set(op.available_backends())
    flat = {path.stem for path in Path(ops.__file__).parent.glob("triton_*.py")}
    assert flat == {"triton_math", "triton_support"}  # which all kernels share


@pytest.mark.skipif(bool(library.unavailable()), reason="the C++ kernels are not built")
def test_kernels_in_cpp_answer_to_their_old_name():
    x = torch.ones(2, 8)
    assert torch.equal(gated(x, "silu", backend="cpu"), gated(x, "silu", backend="cpp"))


def test_adam_of_installed_package_is_preferred(monkeypatch):
    for name in FUSED_ADAM:
        monkeypatch.setitem(sys.modules, name, None)
    line = next(line for line in backends.in_use() if line.startswith("adam: "))
    assert "not fused_adam: import of transformer_engine.pytorch.optimizers" in line and "apex.optimizers" in line
    monkeypatch.setitem(sys.modules, FUSED_ADAM[1], ModuleType("apex.optimizers"))
    assert "adam: fused_adam" in backends.in_use()


@pytest.mark.parametrize("key, op", [("scan", selective_scan), ("ssd", ssd), ("delta", delta)])
def test_config_names_every_backend(key, op):
    named = set(get_args(KernelsConfig.model_fields[key].annotation))
    assert named == {"auto", *op.BACKENDS}
