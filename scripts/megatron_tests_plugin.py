"""The pytest plugin of megatron_tests.py: the project's patches, and a CPU wherever the tests themselves name CUDA.

megatron-core sees only the patches that the project installs. What the tests themselves ask of CUDA (is there one, how
many, tensors with device="cuda", the nccl backend) is answered here, and only where the caller is a test.
Run as a program it imports megatron and collects the tests once, then forks the ranks.
"""

import contextlib
import faulthandler
import importlib
import json
import logging
import os
import signal
import sys
import types
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode

from megatron_blackmamba.engine import changes

changes.install()
utils = importlib.import_module("megatron.core.utils")
utils.is_te_min_version = lambda *_args, **_kwargs: False  # it raises TypeError without Transformer Engine

datasets = importlib.import_module("megatron.core.datasets.utils")
datasets.compile_helpers = lambda: None  # the wheel has them compiled, and no Makefile

# torch's checkpoint log passes each call to its parents; tests that expect an empty log would find it.
logging.getLogger("c10d-NullHandler-dcp_logger").disabled = True

ORDERS = json.loads(os.environ["MEGATRON_TESTS"])
PATIENCE = timedelta(minutes=10)
skipped: dict[str, str] = {}
"""Files of which no test could be collected, with the reason."""


def called_by_a_test() -> bool:
    """Say whether the nearest caller outside torch and this file is a test or a helper of the tests."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name != __name__ and name.split(".")[0] not in ("torch", "contextlib"):
            return name.startswith(("tests.", "test_", "megatron.training"))  # which seeds only where it counts GPUs
        frame = frame.f_back
    return False


def on_cpu(value):
    named = isinstance(value, (str, torch.device)) and str(value).startswith("cuda")
    return torch.device("cpu") if named else value


class OnCpu(TorchFunctionMode):
    """Tensors that tests make or move with a CUDA device stay on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function == torch.Tensor.cuda and called_by_a_test():
            return args[0]
        names_cuda = any(on_cpu(value) is not value for value in [*args, *kwargs.values()])
        if names_cuda and called_by_a_test():
            args, kwargs = [on_cpu(value) for value in args], {key: on_cpu(value) for key, value in kwargs.items()}
        return function(*args, **kwargs)


def answer_tests(name: str, answer):
    real = getattr(torch.cuda, name)
    setattr(torch.cuda, name, lambda *args, **kwargs: answer if called_by_a_test() else real(*args, **kwargs))


answer_tests("is_available", True)
answer_tests("device_count", 8)
answer_tests("get_device_capability", (8, 0))
answer_tests("set_device", None)
answer_tests("empty_cache", None)
answer_tests("reset_peak_memory_stats", None)

download = types.ModuleType("tests.test_utils.python_scripts.download_unit_tests_dataset")
download.download_and_extract_asset = lambda assets_dir: print("nothing is downloaded here")
sys.modules[download.__name__] = download

init_process_group = torch.distributed.init_process_group


def with_gloo(backend=None, *args, **kwargs):
    kwargs["timeout"] = PATIENCE
    return init_process_group("gloo" if backend in (None, "nccl") else backend, *args, **kwargs)


# The tests give their ranks one minute to meet, which is short for eight processes on a busy machine.
set_timeout = torch.distributed.Store.set_timeout
torch.distributed.Store.set_timeout = lambda store, _timeout: set_timeout(store, PATIENCE)


torch.distributed.init_process_group = with_gloo

# megatron-core forgets its groups without ending them. The threads of a gloo group wake a hundred times a second,
# and a file's tests make thousands: the machine would stand still.
parallel_state = importlib.import_module("megatron.core.parallel_state")
new_group, forget_groups, groups = torch.distributed.new_group, parallel_state.destroy_model_parallel, []


def counted_group(*args, **kwargs):
    if kwargs.get("backend") == "nccl":
        kwargs["backend"] = "gloo"
    group = new_group(*args, **kwargs)
    if isinstance(group, torch.distributed.ProcessGroup):
        groups.append(group)
    return group


def end_groups() -> None:
    forget_groups()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        for group in groups:
            with contextlib.suppress(ValueError):  # a test ended it itself
                torch.distributed.destroy_process_group(group)
    groups.clear()


torch.distributed.new_group = torch.distributed.distributed_c10d.new_group = counted_group
parallel_state.destroy_model_parallel = end_groups


def tell(test: str, **more: str) -> None:
    with open(Path(ORDERS["news"]) / f"{os.environ['RANK']}.jsonl", "a") as news:
        news.write(json.dumps({"test": test, **more}) + "\n")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    wanted = ORDERS["only"] or [item.nodeid for item in items if item.nodeid not in ORDERS["skip"]]
    left_out = tuple(f"tests/unit_tests/{name}" for name in ORDERS["left_out"] if "::" in name)
    items[:] = [item for item in items if item.nodeid in set(wanted) and not item.nodeid.startswith(left_out)]
    for item in items:  # limits for GPUs; megatron_tests.py has its own
        item.own_markers = [mark for mark in item.own_markers if mark.name not in ("timeout", "flaky", "flaky_in_dev")]


def pytest_configure(config):
    for mark in ("internal", "flaky", "flaky_in_dev", "experimental", "asyncio"):
        config.addinivalue_line("markers", f"{mark}: megatron-core's own")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    tell(item.nodeid)
    with OnCpu():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makemodule():
    with OnCpu():
        return (yield)


def pytest_collectreport(report):
    if report.skipped:  # a whole file, which asks for a library that is not there
        skipped[report.nodeid] = str(report.longrepr[-1])


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        why = ""
        if report.skipped:
            why = str(report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr)
        elif report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            why = f"{crash.message} ({crash.path}:{crash.lineno})" if crash else str(report.longrepr)[-500:]
        tell(report.nodeid, outcome=report.outcome, why=why)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    """Fork the ranks once the tests have been collected; each runs all of them."""
    for rank in range(int(os.environ["WORLD_SIZE"])):
        if os.fork() == 0:
            become(rank, session.config)
            return
    codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(int(os.environ["WORLD_SIZE"]))]
    os._exit(max(codes))


def become(rank: int, config: pytest.Config) -> None:
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    for file, why in skipped.items():
        tell(file, outcome="skipped", why=why)
    if "tests.unit_tests.test_utilities" in sys.modules:
        sys.modules["tests.unit_tests.test_utilities"].Utils.rank = rank
    for name, module in sys.modules.items():
        if name.startswith("tests.unit_tests") and isinstance(getattr(module, "rank", None), int):
            module.rank = rank  # read while the tests were collected, before the ranks were forked
    own = Path(ORDERS["temporary"]) / str(rank)  # the tests share folders above it
    config._tmp_path_factory._given_basetemp = own
    stacks = os.open(Path(ORDERS["news"]) / f"{rank}.stacks", os.O_WRONLY | os.O_CREAT)
    faulthandler.register(signal.SIGUSR1, stacks)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # sent to the whole process group to ask where each rank waits
    importlib.import_module("megatron.training.training")
    sys.exit(pytest.main(sys.argv[1:]))
