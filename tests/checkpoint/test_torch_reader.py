"""torch's own readers open a checkpoint: nothing in it needs this project or megatron-core."""

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save


def test_torch_converts_a_checkpoint_to_one_file(run, trainable, tmp_path):
    folder = run.checkpoint(7)
    assert b"megatron" not in (folder / ".metadata").read_bytes()  # the names of classes in a pickle
    dcp_to_torch_save(folder, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    state = trainable.model.state_dict()
    weights = {name: whole.pop(name) for name in state if name in whole}
    assert weights.keys() == {name for name in state if not name.endswith("_extra_state")}
    for name, tensor in weights.items():
        assert torch.equal(tensor, state[name]), name
    kinds = {tuple(name.split(".", 3)[:3]) for name in whole}
    assert kinds == {("optimizer", "state", part) for part in ("param", "exp_avg", "exp_avg_sq")}
    for name, tensor in whole.items():
        assert tensor.shape == weights[name.split(".", 3)[3]].shape and tensor.isfinite().all(), name


def test_torch_loads_the_plain_values(run):
    assert isinstance(torch.load(run.checkpoint(7) / "common.pt", weights_only=True), dict)
