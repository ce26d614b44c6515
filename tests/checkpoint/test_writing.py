"""The answer of a writer process about its part of a save."""

from types import SimpleNamespace

import torch

from megatron_blackmamba.checkpoint.writing import _written


def bucket(path, **tensors):
    items = [(SimpleNamespace(index=SimpleNamespace(fqn=name)), tensor) for name, tensor in tensors.items()]
    return str(path), None, ([], items)


def test_non_finite_weights_are_named_and_not_written(tmp_path):
    calls = []
    part = _written(calls.append, [bucket(tmp_path / "a", good=torch.ones(2), bad=torch.tensor([1.0, float("nan")]))])
    assert part.not_finite == "bad" and part.problem is None
    assert calls == [] and part.files == {}


def test_a_failing_write_names_file_and_cause(tmp_path):
    def write(*_, **__):
        raise OSError(28, "No space left on device")

    part = _written(write, [bucket(tmp_path / "a", good=torch.ones(2))])
    assert part.problem == "writing a: No space left on device"
