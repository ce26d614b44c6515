"""Scans and convolutions over sequences that three gloo ranks share, part by part.

`python -m tests.ops.context_probe FOLDER`: each rank leaves its part of the outputs and of all gradients there.
"""

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_blackmamba.ops.causal_conv1d import causal_conv1d
from megatron_blackmamba.ops.causal_conv1d.part import causal_conv1d_part
from megatron_blackmamba.ops.delta import delta, delta_part
from megatron_blackmamba.ops.mamba3 import mamba3
from megatron_blackmamba.ops.selective_scan import selective_scan
from megatron_blackmamba.ops.selective_scan.part import selective_scan_part
from megatron_blackmamba.ops.ssd import ssd
from megatron_blackmamba.ops.ssd.part import ssd_part
from tests.ops import interpreted
from tests.ops.implementations import ISAS, implementation
from tests.ops.test_causal_conv1d import conv_inputs
from tests.ops.test_delta import TOKENS
from tests.ops.test_delta import problem as delta_inputs
from tests.ops.test_mamba3 import problem as mamba3_inputs
from tests.ops.test_mamba3 import rates_of
from tests.ops.test_selective_scan import scan_inputs
from tests.ops.test_ssd import problem as ssd_inputs
from tests.runtime.ranks import fork_ranks

PARTS = ((0, 9), (9, 26), (26, 40))
RESETS = {"none": None, "some": "some", "first": "first", "last": "last", "all": "all"}
BACKENDS = ("float64", "chunked", *(f"cpp-{isa}" for isa in ISAS[-1:]))
INTERPRETED = ("triton",) if find_spec("triton") else ()
MAMBA3 = {"mamba3": 1, "mimo": 3}
"""Operation -> inputs of a head."""
OF_TIME = {"u", "delta", "B", "C", "z", "x", "dt", "A_of_token", "trap", "angle", *TOKENS}

Leaves = dict[str, Tensor]


def scan(leaves: Leaves, reset: Tensor | None, function: Callable[..., Tensor], backend: str) -> Tensor:
    y: Tensor = function(
        *(leaves[name] for name in ("u", "delta", "A", "B", "C", "D")),
        z_BLI=leaves["z"],
        delta_bias_I=leaves["delta_bias"],
        reset_BL=reset,
        backend=backend,
    )
    return y


def scan_of_mamba2(leaves: Leaves, reset: Tensor | None, function: Callable[..., Tensor], backend: str) -> Tensor:
    inputs = (leaves[name] for name in ("x", "dt", "A", "B", "C", "D"))
    y: Tensor = function(*inputs, dt_bias_H=leaves["dt_bias"], reset_BL=reset, backend=backend)
    return y.flatten(2)


def scan_of_mamba3(leaves: Leaves, reset: Tensor | None, group: dist.ProcessGroup | None) -> Tensor:
    inputs = (leaves[name] for name in ("B", "C", "B_bias", "C_bias", "D"))
    y, _ = mamba3(leaves["x"], rates_of(leaves), *inputs, mix_HRP=leaves.get("mix"), reset_BL=reset, group=group)
    if y.dim() == 5:  # no two outputs of a head count the same
        y = torch.einsum("blrhp,r->blhp", y, torch.arange(1, y.shape[2] + 1, dtype=y.dtype))
    return y.flatten(2)


def scan_by_delta_rule(leaves: Leaves, reset: Tensor | None, group: dist.ProcessGroup | None, backend: str) -> Tensor:
    inputs = [leaves[name] for name in TOKENS]
    if group is None:
        return delta(*inputs, reset_BL=reset, backend=backend)[0].flatten(2)
    return delta_part(*inputs, reset_BL=reset, group=group, backend=backend).flatten(2)


def convolve(leaves: Leaves, reset: Tensor | None, group: dist.ProcessGroup | None, backend: str) -> Tensor:
    x, weight = leaves["x"], leaves["weight"]
    function = causal_conv1d if group is None else partial(causal_conv1d_part, group=group)
    y: Tensor = function(x, weight, leaves["bias"], reset_BL=reset, backend=backend)
    return y


def problem(operation: str, reset: str) -> tuple[Leaves, Tensor | None]:
    if operation == "scan":
        tensors, options = scan_inputs(I=5, N=4, without=("initial_state",), reset=RESETS[reset])
        tensors["delta_bias"] -= 3.0  # states live for the length of several parts
    elif operation == "ssd":
        tensors, reset_BL = ssd_inputs(L=40, H=5, P=1, G=1, N=4, without=("initial_state",), reset=RESETS[reset])
        tensors["dt_bias"] -= 3.0
        return tensors, reset_BL
    elif operation == "delta":
        return delta_inputs(L=40, H=1, K=6, V=5, state=False, reset=RESETS[reset])
    elif operation in MAMBA3:
        rank = MAMBA3[operation]
        tensors, reset_BL = mamba3_inputs(L=40, H=5, P=1, G=1, N=4, reset=RESETS[reset], R=rank)
        tensors["dt_bias"] -= 3.0
        return tensors, reset_BL
    else:
        tensors, options = conv_inputs(I=5, window=False, reset=RESETS[reset])
    return tensors, options["reset_BL"]


def run(operation: str, reset_name: str, backend: str, group: dist.ProcessGroup | None, part: slice) -> Leaves:
    """Return y and the gradients of a part, or of the whole sequences without a group."""
    tensors, reset = problem(operation, reset_name)
    exact = backend == "float64"
    leaves = {
        name: (x[:, part] if name in OF_TIME else x).to(torch.float64 if exact else x.dtype).clone().requires_grad_()
        for name, x in tensors.items()
    }
    reset = None if reset is None else reset[:, part]

    def compute(used: str) -> Tensor:
        if operation == "scan":
            return scan(leaves, reset, partial(selective_scan_part, group=group) if group else selective_scan, used)
        if operation == "ssd":
            return scan_of_mamba2(leaves, reset, partial(ssd_part, group=group) if group else ssd, used)
        if operation == "delta":
            return scan_by_delta_rule(leaves, reset, group, used)
        if operation in MAMBA3:
            return scan_of_mamba3(leaves, reset, group)
        return convolve(leaves, reset, group, "reference" if used == "chunked" else used)

    with implementation("reference" if exact else backend) as used:
        y = compute(used)
        with torch.no_grad():
            assert torch.equal(compute(used), y)  # validation takes another way
    whole = torch.randn(2, PARTS[-1][1], 5, generator=torch.Generator().manual_seed(3))
    y.backward(whole[:, part].to(y.dtype))
    return {"y": y.detach()} | {f"gradient of {name}": x.grad for name, x in leaves.items() if x.grad is not None}


def cases() -> list[tuple[str, str, str]]:
    every = [(operation, reset, backend) for operation in ("scan", "conv") for reset in RESETS for backend in BACKENDS]
    every += [
        (op, reset, backend)
        for op in ("ssd", "delta", *MAMBA3)
        for reset in RESETS
        for backend in ("float64", "chunked")
    ]
    return every + [
        (operation, "some", backend) for operation in ("scan", "conv", "ssd", "delta") for backend in INTERPRETED
    ]


def body(folder: Path, chosen: list[tuple[str, ...]]) -> None:
    dist.init_process_group("gloo")
    group, rank = dist.group.WORLD, dist.get_rank()
    part = slice(*PARTS[rank])
    torch.save({case: run(*case, group, part) for case in chosen}, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def main(folder: Path, chosen: list[str]) -> None:
    if INTERPRETED:
        os.environ["TRITON_INTERPRET"] = "1"
        interpreted._prepare()
    answers = fork_ranks(len(PARTS), partial(body, folder, [tuple(case.split("/")) for case in chosen]))
    print(json.dumps([answer.get("trace") or answer["error"] for answer in answers if "error" in answer]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
