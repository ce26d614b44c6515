"""Attention within documents beside its definition, and documents that never see each other."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_blackmamba.ops import attention as op
from megatron_blackmamba.ops.attention import attention, documents_of
from tests.ops.implementations import PROPERTY
from tests.runtime.ranks import run


def problem(B, L, H, G, C, often, seed, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, heads, L, C, generator=g, dtype=dtype).requires_grad_() for heads in (H, G, G))
    return q, k, v, torch.rand(B, L, generator=g) < often


def defined(q, k, v, reset):
    """One query at a time, over the tokens of its document up to itself."""
    each, rows = q.shape[1] // k.shape[1], torch.zeros_like(q)
    for b in range(q.shape[0]):
        start = 0
        for t in range(q.shape[2]):
            start = t if reset[b, t] else start
            for h in range(q.shape[1]):
                scores = k[b, h // each, start : t + 1] @ q[b, h, t] / q.shape[3] ** 0.5
                rows[b, h, t] = torch.softmax(scores, 0) @ v[b, h // each, start : t + 1]
    return rows


def largest_scores(q, k, reset):
    """Of each head, of all queries and the tokens of their documents up to themselves."""
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT / q.shape[3] ** 0.5
    document = reset.cumsum(1)
    unseen = (document[:, :, None] != document[:, None]) | torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(unseen[:, None], -torch.inf).amax((0, 2, 3)).detach()


@PROPERTY
@given(
    B=st.integers(1, 3),
    L=st.integers(1, 40),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 3)]),
    often=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    block=st.sampled_from([1, 3, 8, 512]),
    seed=st.integers(0, 2**20),
)
def test_blocks_agree_with_the_definition(B, L, heads, often, block, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "BLOCK", block)
        q, k, v, reset = problem(B, L, *heads, 6, often, seed)
        weight = torch.randn(q.shape, generator=torch.Generator().manual_seed(1), dtype=q.dtype)
        exact = defined(q, k, v, reset)
        largest = torch.full(heads[:1], -torch.inf, dtype=q.dtype)
        found = attention(q, k, v, documents_of(reset), largest_H=largest)
        torch.testing.assert_close(found, exact, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(largest, largest_scores(q, k, reset), atol=1e-12, rtol=1e-12)
        expected, gradients = (torch.autograd.grad((y * weight).sum(), (q, k, v)) for y in (exact, found))
        for a, b in zip(gradients, expected, strict=True):
            torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11)


def test_a_document_does_not_reach_another():
    q, k, v, _ = problem(1, 30, 4, 2, 6, 0.0, 0)
    reset = torch.zeros(1, 30, dtype=torch.bool)
    reset[:, 11] = True
    y = attention(q, k, v, documents_of(reset))
    grads = torch.autograd.grad(y[:, :, 11:].sum(), (q, k, v))
    assert all(bool((grad[:, :, :11] == 0).all()) for grad in grads)
    with torch.no_grad():
        k[:, :, :11] += 1e6
    assert torch.equal(attention(q, k, v, documents_of(reset))[:, :, 11:], y[:, :, 11:])


def test_no_mask_is_larger_than_a_block(monkeypatch):
    seen = []
    visible = op._visible
    monkeypatch.setattr(op, "BLOCK", 16)
    monkeypatch.setattr(op, "_visible", lambda *given: seen.append(visible(*given)) or seen[-1])
    q, k, v, _ = problem(1, 128, 2, 2, 4, 0.0, 0)
    reset = torch.zeros(1, 128, dtype=torch.bool)
    reset[:, ::32] = True
    attention(q, k, v, documents_of(reset)).sum().backward()
    assert max(mask.shape[-2] for mask in seen) == 16 and max(mask.shape[-1] for mask in seen) == 32
    monkeypatch.setattr(op, "MASK", 512)
    reset[:, 1:] = False
    attention(q, k, v, documents_of(reset)).sum().backward()
    assert max(mask.numel() for mask in seen[-64:]) == 512


MEMORY = """
import torch
from pathlib import Path
from megatron_blackmamba.ops import attention as op

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024

torch.set_num_threads(1)
op.MASK = 2**17  # 512 blocks of 4 queries
k, v = (torch.randn(1, 1, 32768, 16, requires_grad=True) for _ in range(2))
for L in (8, 2048):
    before, q = resident(), torch.randn(1, 1, L, 16, requires_grad=True)
    y = op._Blocks.apply(q, k, v, op._one(q, k), 32768 - L, None)
print(resident() - before)
"""


def test_many_blocks_leave_no_holes_in_memory():
    done = run(MEMORY)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 50  # each result would keep the place of a block's mask
