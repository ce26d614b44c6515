"""An update that clips and casts inside Triton's Adam, interpreted, equals megatron-core's separate passes."""

from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from tests.ops.interpreted import interpreter

pytestmark = pytest.mark.xdist_group("triton")


def run_updates(folder, fused):
    """Return the weights in both precisions after two clipped updates, whether clipping is apart, and the norms."""
    from megatron_blackmamba.config import ParallelConfig
    from megatron_blackmamba.runtime import world
    from megatron_blackmamba.runtime.adam import Adam
    from tests.training.short_runs import Run

    place = world.start(ParallelConfig())
    try:
        with mock.patch.object(Adam, "fused", Adam.fused if fused else False):
            run = Run(place, folder, "bf16", "optimizer.clip=0.5")
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


def test_fused_update_clips_and_casts_alike(tmp_path):
    with interpreter() as run:
        main, narrow, clip, norms = run(run_updates, tmp_path / "fused", True)
        expected, _, clip_apart, expected_norms = run(run_updates, tmp_path / "apart", False)
    assert (clip, clip_apart) == (0.0, 0.5) and norms == expected_norms and min(norms) > 1
    for ours, theirs, weight in zip(main, expected, narrow, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(weight.float(), ours, rtol=2**-7, atol=0)  # the interpreter cuts digits off
