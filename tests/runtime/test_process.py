"""Settings of a whole process."""

import gc
import os
import subprocess
import sys
import weakref

from megatron_blackmamba.runtime import process


class Node:
    """An object that only the garbage collector can free."""

    def __init__(self):
        self.itself = self


def test_garbage_is_freed_before_the_rest_is_frozen():
    gone, before, frozen = weakref.ref(Node()), gc.get_threshold(), gc.get_freeze_count()
    gc.set_threshold(*before[:2], 100)
    try:
        process.freeze_gc()
        assert gone() is None and gc.get_freeze_count() > frozen
        assert gc.get_threshold()[2] == 10
    finally:
        gc.set_threshold(*before)


def test_command_line_rarely_looks_through_its_imports():
    code = "import atexit, gc, sys; from megatron_blackmamba.__main__ import main; sys.argv[1:] = ['--help']\n"
    code += "atexit.register(lambda: print(gc.get_threshold()[2])); main()"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.endswith("\n100\n"), told.stdout + told.stderr


def test_cuda_settings_leave_given_values(monkeypatch):
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    process.prepare_cuda()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:512")  # the newer name of the same setting
    process.prepare_cuda()
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ
