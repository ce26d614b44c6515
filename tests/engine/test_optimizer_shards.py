"""A range of a parameter's elements as boxes of its shape."""

import math

import pytest
import torch

from megatron_blackmamba.engine.parts.optimizer_shards import boxes


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (1, 3, 1), (2, 1, 3, 2)])
def test_boxes_hold_exactly_the_range_in_order(shape):
    x = torch.arange(math.prod(shape)).view(shape)
    for start in range(x.numel() + 1):
        for end in range(start, x.numel() + 1):
            found = list(boxes(shape, start, end))
            parts = [x[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))] for box in found]
            assert [part.shape for part in parts] == [torch.Size(size) for _, size in found]
            assert [number for part in parts for number in part.flatten().tolist()] == list(range(start, end))
            assert len(found) <= max(1, 2 * len(shape) - 1)
