"""Runs Triton kernels without a GPU: in a process of its own, where Triton interprets instead of compiling.

Triton decides between the two when a kernel is defined, so the process is started with TRITON_INTERPRET=1 and lives
until all tests are done. What is sent to it must be importable there: functions of this package and plain tensors.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any


class Interpreter:
    def __init__(self, pool: ProcessPoolExecutor):
        self._pool = pool

    def start(self, function: Callable, *args) -> Future:
        return self._pool.submit(function, *args)

    def __call__(self, function: Callable, *args):
        return self.start(function, *args).result()


@contextmanager
def interpreter() -> Iterator[Interpreter]:
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_prepare)
    try:
        pool.submit(os.getpid).result()  # the process has started, with the environment above
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
    with pool:
        yield Interpreter(pool)


def last_program_first(patch: Any) -> None:
    """Interpret programs from the last to the first: what one writes behind its own part then stays, and is wrong."""
    from triton.runtime.interpreter import InterpreterBuilder

    place = InterpreterBuilder.set_grid_idx
    turned = lambda builder, *at: place(builder, *(n - 1 - i for n, i in zip(builder.grid_dim, at, strict=True)))
    patch.setattr(InterpreterBuilder, "set_grid_idx", turned)


def _prepare() -> None:
    import torch
    import triton.runtime.interpreter as triton_interpreter

    torch.set_num_threads(1)
    patch = triton_interpreter._patch_lang_tensor

    def patch_for_numpy(tensor, *scope):
        """Triton up to 3.6 turns one-element arrays into loop bounds by int(), which NumPy 2.4 refuses."""
        patch(tensor, *scope)
        set_attribute = scope[0].set_attr if scope else setattr  # 3.4 and 3.5 have no scope
        set_attribute(tensor, "__index__", lambda self: int(self.handle.data.item()))

    triton_interpreter._patch_lang_tensor = patch_for_numpy
    _keep_masks_boolean(triton_interpreter.InterpreterBuilder)


def _keep_masks_boolean(builder: type) -> None:
    """Triton's interpreter holds `tensor & scalar` of two conditions as int32, which 3.9's loads and stores refuse."""
    load, store = builder.create_masked_load, builder.create_masked_store

    def masked_load(self, pointers, mask, *rest):
        mask.data = mask.data.astype(bool)
        return load(self, pointers, mask, *rest)

    def masked_store(self, pointers, value, mask, *rest):
        mask.data = mask.data.astype(bool)
        return store(self, pointers, value, mask, *rest)

    builder.create_masked_load, builder.create_masked_store = masked_load, masked_store
