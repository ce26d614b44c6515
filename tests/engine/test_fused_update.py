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
