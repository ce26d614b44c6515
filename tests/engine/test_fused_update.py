"""An update that clips and casts inside this project's Adam equals megatron-core's separate passes.

Triton's kernel is interpreted.
"""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

pytestmark = pytest.mark.xdist_group("triton")


def run_updates(folder, how, gradients="fp32"):
    """Return the weights in both precisions after two clipped updates, whether clipping is apart, and the norms.

    how: "kernel", "pytorch" or "megatron-core".
    """
    from megatron_blackmamba.config import ParallelConfig
    from megatron_blackmamba.engine.adam import Adam
    from megatron_blackmamba.runtime import world
    from tests.training.short_runs import Run

    place = world.start(ParallelConfig())
    try:
        with nullcontext() if how == "kernel" else mock.patch.object(Adam, "fused", False):
            left_out = frozenset({"fused-update"} if how == "megatron-core" else ())
            words = ("optimizer.clip=0.5", f"optimizer.gradients={gradients}")
            run = Run(place, folder, "bf16", *words, skip=left_out)
            weights = list(run.trainable.model.parameters())
            norms = []
            for step in range(2):
                run.schedule.set(step)
                random = torch.Generator().manual_seed(step)
                run.trainable.reduced.zero_grad_buffer()
                for weight in weights:
                    weight.main_grad.copy_(torch.randn(weight.shape, generator=random))
                norms.append(run.step.update().grad_norm)
            main = [getattr(weight, "main_param", weight.detach()).clone().view(-1) for weight in weights]
            narrow = [weight.detach().clone().view(-1) for weight in weights]
            return main, narrow, run.trainable.optimizer.config.clip_grad, norms
    finally:
        world.shutdown()


@pytest.mark.parametrize("how, gradients", [("kernel", "fp32"), ("kernel", "bf16"), ("pytorch", "bf16")])
def test_fused_update_clips_and_casts_alike(interpreted, tmp_path, how, gradients):
    main, narrow, clip, norms = interpreted(run_updates, tmp_path / "fused", how, gradients)
    expected, _, clip_apart, expected_norms = interpreted(run_updates, tmp_path / "apart", "megatron-core", gradients)
    assert (clip, clip_apart) == (0.0, 0.5) and min(norms) > 1
    assert norms == pytest.approx(expected_norms, rel=1e-6)
    for ours, theirs, weight in zip(main, expected, narrow, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(weight.float(), ours, rtol=2**-7, atol=0)  # the interpreter cuts digits off


def run_bad_update(folder):
    """Return whether an update with an infinite gradient raises, and whether the next one equals a first one's."""
    from megatron_blackmamba.config import ParallelConfig
    from megatron_blackmamba.runtime import world
    from tests.training.short_runs import Run

    place = world.start(ParallelConfig())
    try:
        found = []
        for bad_first in (False, True):
            run = Run(place, folder, "bf16", "optimizer.clip=0.5")
            weights = list(run.trainable.model.parameters())
            norms = []
            for size in [float("inf"), 1.0] if bad_first else [1.0]:
                run.schedule.set(0)
                for weight in weights:
                    weight.main_grad.fill_(size)
                update = run.step.update()
                norms.append((update.applied, update.grad_norm))
            state = [
                x.clone() for part in run.trainable.optimizer.chained_optimizers for x in values_of(part.optimizer)
            ]
            found.append((norms, [run.weights(), *state]))
        return found
    finally:
        world.shutdown()


def values_of(adam):
    yield from (x for state in adam.state.values() for x in state.values())
    yield torch.tensor([group["step"] for group in adam.param_groups if group["params"]])


def test_infinite_gradients_change_nothing(interpreted, tmp_path):
    (good, expected), (bad, actual) = interpreted(run_bad_update, tmp_path)
    assert bad == [(False, float("inf")), *good] and good[0][0]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(actual, expected, strict=True))


def run_kept_gradients(folder):
    """Return norm and weights after an update from gradients in the fp32 buffers, and from the same ones in bf16."""
    from megatron_blackmamba.config import ParallelConfig
    from megatron_blackmamba.runtime import world
    from tests.training.short_runs import Run

    place = world.start(ParallelConfig())
    try:
        found = []
        for kept in (False, True):
            run = Run(place, folder, "bf16", "optimizer.clip=0.5")
            assert run.trainable.reduced.reads_grad
            random = torch.Generator().manual_seed(0)
            for weight in run.trainable.model.parameters():
                gradient = torch.randn(weight.shape, generator=random).to(weight.dtype)
                weight.main_grad.copy_(torch.full_like(gradient, 9) if kept else gradient)
                weight.grad = gradient if kept else None
            found.append((run.step.update().grad_norm, run.weights()))
        return found
    finally:
        world.shutdown()


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="before torch 2.10 gradients have a weight's type")
def test_kept_bf16_gradients_update_bit_for_bit(interpreted, tmp_path):
    (norm, expected), (kept_norm, kept) = interpreted(run_kept_gradients, tmp_path)
    assert norm == kept_norm > 1 and torch.equal(kept, expected)


def test_bf16_gradients_are_not_copied(interpreted, tmp_path):
    assert interpreted(gradient_places, tmp_path, "bf16") == {(torch.bfloat16, True)}


def gradient_places(folder, gradients):
    """Return the dtypes of the gradients of bf16 weights, and whether Adam gets them as they are in the buffers."""
    from megatron_blackmamba.config import ParallelConfig
    from megatron_blackmamba.runtime import world
    from tests.training.short_runs import Run

    place = world.start(ParallelConfig())
    try:
        run = Run(place, folder, "bf16", f"optimizer.gradients={gradients}")
        run.step.gradients(run.batches())
        run.trainable.optimizer.prepare_grads()
        found = set()
        for weight in run.trainable.model.parameters():
            if weight.dtype == torch.bfloat16:
                here = weight.main_param.grad.untyped_storage().data_ptr()
                found.add((weight.main_param.grad.dtype, here == weight.main_grad.untyped_storage().data_ptr()))
        return found
    finally:
        world.shutdown()
