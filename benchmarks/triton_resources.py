"""GPU resources of the kernels, read from their machine code, without a GPU.

    python -m benchmarks.triton_resources [--arch 80 90] [--json]

The operations run as in training, forward and backward, on tensors without data. Each kernel is compiled for the
architecture, with the specialisation of a real call, but not launched. Registers, spills, shared memory and the
instruction mix of the main loop are read from the binary. `ptxas`, `cuobjdump` and `nvdisasm` come with Triton. The
kernels in CUDA C++ are left out where NVRTC or cuda-bindings is missing; both come with PyTorch for CUDA.
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver
from triton.runtime.jit import JITFunction

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
BATCH, LENGTH, INNER, STATE, TAPS, EXPERTS = 8, 2048, 2304, 16, 4, 8  # the 1.5B model, 8 sequences
HEAD, SSD_STATE = 64, 128  # of Mamba-2
KEYS = 128  # of a head of the delta rule, and its values
MODEL, HIDDEN, VOCABULARY = 1152, 3072, 50_304


@dataclass
class Loop:
    """The innermost loop with most exponentials, as machine code."""

    instructions: int = 0
    mix: dict[str, int] = field(default_factory=dict)

    def count(self, *prefixes: str) -> int:
        return sum(n for opcode, n in self.mix.items() if opcode.startswith(prefixes))


@dataclass
class Kernel:
    name: str
    arch: int
    warps: int
    constants: dict[str, int | str]
    registers: int
    spilled_bytes: int
    shared_bytes: int
    cubin: bytes = field(repr=False)
    ttgir: str = field(default="", repr=False)
    """Triton's last representation whose operations are those of whole tiles; kernels in CUDA C++ have none."""

    @cached_property
    def code(self) -> str:
        """The machine code as text, with its encoding; writing it takes longer than all else."""
        text = _output("nvdisasm", self.cubin, "-c", "-hex")
        return text.partition(f".text.{self.name}:")[2].partition("\n.text.")[0]

    @cached_property
    def loop(self) -> Loop:
        """The main loop."""
        return _loop(self.code)

    @cached_property
    def instructions(self) -> int:
        return len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", self.code, re.MULTILINE))

    def as_json(self) -> dict[str, object]:
        known = {
            name: value
            for name, value in vars(self).items()
            if name not in ("cubin", "ttgir", "code", "loop", "instructions")
        }
        return known | {"loop": asdict(self.loop)}


def kernels_of(run: Callable[..., object], arch: int, **options: bool) -> list[Kernel]:
    """Compile, without a GPU, every kernel that `run(arch, **options)` launches."""
    with _compiling_only(arch) as launches:
        run(arch, **options)
    return [_read(name, constants, compiled, arch) for name, constants, compiled in launches]


class _NoDevice(DriverBase):
    """A Triton driver without a device: it only names the architecture to compile for."""

    def __init__(self, arch: int):
        self.arch = arch

    def is_active(self) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("nothing is launched")

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def get_benchmarker(self):
        raise NotImplementedError("nothing is launched")

    def get_current_device(self) -> str:
        return f"sm_{self.arch}"

    def get_current_stream(self, device: str) -> int:
        return 0


@contextmanager
def _compiling_only(arch: int) -> Iterator[list]:
    launches: list = []
    launch = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        compiled = launch(self, *args, grid=grid, warmup=True, **kwargs)
        constants = {k: v for k, v in kwargs.items() if k.isupper()}
        if not any(compiled is seen for _, _, seen in launches):
            launches.append((self.fn.__name__, constants, compiled))
        return compiled

    JITFunction.run = compile_only
    driver.set_active(_NoDevice(arch))
    try:
        yield launches
    finally:
        JITFunction.run = launch
        driver._active = None


def _read(name: str, constants: dict[str, int | str], compiled, arch: int) -> Kernel:
    usage = _output("cuobjdump", compiled.asm["cubin"], "-res-usage")
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    return Kernel(
        name,
        arch,
        compiled.metadata.num_warps,
        constants,
        int(registers),
        int(stack),
        compiled.metadata.shared,
        compiled.asm["cubin"],
        str(compiled.asm["ttgir"]),
    )


def cuda_kernels(arch: int) -> list[Kernel]:
    """Compile the kernels of the scan in CUDA C++, its forward pass with one and with two channels a thread."""
    from megatron_blackmamba.ops import nvrtc
    from megatron_blackmamba.ops.selective_scan import cuda_launch

    found = []
    for channels in (1, 2):
        defines = {"HAS_Z": 1, "HAS_RESET": 0, "SOFTPLUS": 1, "RAGGED": 0, "SAVE": 1, "CHANNELS": channels, "LOG_A": 1}
        cubin = nvrtc.compile_source(cuda_launch.SOURCE, defines, f"sm_{arch}")
        usage = _output("cuobjdump", cubin, "-res-usage")
        for name, registers, stack in re.findall(r"Function (\w+):\n\s*REG:(\d+) STACK:(\d+)", usage):
            states = {"scan_forward": channels * 64, "scan_backward": 64}.get(name, 0)
            if name == "scan_forward" or channels == 1:
                warps = 4 // channels if name == "scan_forward" else 4
                constants: dict[str, int | str] = {"CHANNELS": channels, "STATES": states}
                found.append(Kernel(name, arch, warps, constants, int(registers), int(stack), 0, cubin))
    return found


def _output(tool: str, cubin: bytes, *options: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([TOOLS / tool, *options, file.name], capture_output=True, text=True, check=True).stdout


def _loop(code: str) -> Loop:
    instructions: list[str] = []
    labels: dict[str, int] = {}
    loops = [Loop()]
    for line in code.splitlines():
        if label := re.match(r"\.(L_x_\d+):", line.strip()):
            labels[label[1]] = len(instructions)
        elif instruction := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*?);", line):
            instructions.append(re.sub(r"^@!?U?P\w+ ", "", instruction[1]))
            target = re.match(r"BRA.*`\(\.(L_x_\d+)\)", instructions[-1])
            if target and labels.get(target[1], len(instructions)) < len(instructions) - 1:
                body = instructions[labels[target[1]] :]
                loops.append(Loop(len(body), dict(Counter(i.split()[0] for i in body).most_common())))
    return max(loops, key=lambda loop: (loop.count("MUFU") / max(1, loop.instructions), loop.instructions))


def bf16(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="meta", dtype=torch.bfloat16, requires_grad=True)


def fp32(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="meta", requires_grad=True)


def scan_launches(arch: int, reset: bool = False, keep: bool = True, backward: bool = True) -> None:
    """The selective scan of a training step: gate, skip, bias, softplus."""
    from megatron_blackmamba.ops.selective_scan import Inputs
    from megatron_blackmamba.ops.selective_scan.triton import scan
    from megatron_blackmamba.ops.selective_scan.triton_tuning import rule

    u, delta, z = (bf16(BATCH, LENGTH, INNER) for _ in range(3))
    B, C = (bf16(BATCH, LENGTH, STATE) for _ in range(2))
    resets = torch.empty(BATCH, LENGTH, device="meta", dtype=torch.bool) if reset else None
    plan = rule(BATCH, LENGTH, INNER, major=arch // 10, keep=keep)
    inputs = Inputs(u, delta, fp32(INNER, STATE), B, C, fp32(INNER), z, fp32(INNER), reset_BL=resets)
    y, _ = scan(inputs, plan)
    if backward:
        y.sum().backward()


def ssd_launches(arch: int, reset: bool = False) -> None:
    """Mamba-2's scan of a training step."""
    from megatron_blackmamba.ops.ssd import Inputs
    from megatron_blackmamba.ops.ssd.triton import scan

    heads = INNER // HEAD
    x, dt = bf16(BATCH, LENGTH, heads, HEAD), bf16(BATCH, LENGTH, heads)
    B, C = (bf16(BATCH, LENGTH, 1, SSD_STATE) for _ in range(2))
    resets = torch.empty(BATCH, LENGTH, device="meta", dtype=torch.bool) if reset else None
    y, _ = scan(Inputs(x, dt, fp32(heads), B, C, fp32(heads), fp32(heads), None, resets))
    y.sum().backward()


def delta_launches(arch: int, reset: bool = False, by_channel: bool = False) -> None:
    """The delta rule of a training step, with one decay a head or one for each key channel."""
    from megatron_blackmamba.ops.delta import Inputs
    from megatron_blackmamba.ops.delta.triton import scan

    heads = INNER // KEYS
    q, k, erase, written = (fp32(BATCH, LENGTH, heads, KEYS) for _ in range(4))
    decay = fp32(BATCH, LENGTH, heads, KEYS if by_channel else 1)
    resets = torch.empty(BATCH, LENGTH, device="meta", dtype=torch.bool) if reset else None
    y, _ = scan(Inputs(q, k, erase, written, decay, None, resets))
    y.sum().backward()


def convolution_launches(arch: int, reset: bool = False) -> None:
    from megatron_blackmamba.ops.causal_conv1d import Inputs
    from megatron_blackmamba.ops.causal_conv1d.halves import RowGradient
    from megatron_blackmamba.ops.causal_conv1d.triton import convolve_rows

    resets = torch.empty(BATCH, LENGTH, device="meta", dtype=torch.bool) if reset else None
    rows = bf16(BATCH, LENGTH, 2 * INNER)
    inputs = Inputs(rows.chunk(2, dim=-1)[0], bf16(INNER, TAPS), bf16(INNER), reset_BL=resets)
    x, again, z = convolve_rows(rows, inputs, RowGradient())
    (x.sum() + again.sum() + z.sum()).backward()


def sinkhorn_launches(arch: int, reset: bool = False) -> None:
    """The default: the start, an iteration, and the choice with its counts."""
    from megatron_blackmamba.ops.sinkhorn import Inputs
    from megatron_blackmamba.ops.sinkhorn.triton import choice

    counts = torch.empty(EXPERTS, device="meta", dtype=torch.int64)
    choice(Inputs(fp32(BATCH * LENGTH, EXPERTS).detach()), counts)


def large_sinkhorn_launches(arch: int, reset: bool = False) -> None:
    """More logits than one program takes, and as many experts as can be."""
    from megatron_blackmamba.ops.sinkhorn import Inputs
    from megatron_blackmamba.ops.sinkhorn.triton import ONE_PROGRAM, choice

    choice(Inputs(fp32(2 * ONE_PROGRAM // 256, 256).detach()))


def order_launches(arch: int, reset: bool = False) -> None:
    from megatron_blackmamba.ops.order.triton import order_of

    order_of(torch.empty(BATCH * LENGTH, device="meta", dtype=torch.int64), EXPERTS)


def gated_launches(arch: int, reset: bool = False) -> None:
    from megatron_blackmamba.ops.gated.triton import gated

    gated(bf16(BATCH * LENGTH, 2 * HIDDEN), "silu", fp32(BATCH * LENGTH)).sum().backward()


def norm_launches(arch: int, reset: bool = False) -> None:
    from megatron_blackmamba.ops.rms_norm.triton import norm_and_stream

    y, stream = norm_and_stream(fp32(BATCH * LENGTH, MODEL), bf16(MODEL), 1e-5, bf16(BATCH * LENGTH, MODEL))
    (y.sum() + stream.sum()).backward()


def gated_norm_launches(arch: int, reset: bool = False) -> None:
    """Mamba-2's, whose gates are a part of in_proj's rows; and Mamba-3's, of each head and in front of the gate."""
    from megatron_blackmamba.ops.gated_norm.triton import gated_rms_norm

    rows = 2 * INNER + 2 * SSD_STATE + INNER // HEAD
    for groups, norm_first in ((1, False), (INNER // HEAD, True)):
        gate = bf16(BATCH * LENGTH, rows)[:, :INNER]
        gated_rms_norm(bf16(BATCH * LENGTH, INNER), gate, bf16(INNER), groups, 1e-5, norm_first).sum().backward()


def cross_entropy_launches(arch: int, reset: bool = False) -> None:
    from megatron_blackmamba.ops.cross_entropy.triton import losses_of

    labels = torch.empty(BATCH * LENGTH, device="meta", dtype=torch.int64)
    for differentiate in (False, True):
        losses_of(bf16(BATCH * LENGTH, VOCABULARY), labels, differentiate)


def adam_launches(arch: int, reset: bool = False) -> None:
    from megatron_blackmamba.ops.adam import triton as triton_adam

    numbers = MODEL * HIDDEN
    wide, narrow = torch.float32, torch.bfloat16
    for shift, gradients, moments in ((0, wide, wide), (1, wide, wide), (0, wide, narrow), (1, narrow, narrow)):
        dtypes = (gradients, wide, moments, moments, narrow)  # shift 0: aligned to 16 bytes
        table = triton_adam.Table(*([torch.empty(numbers + shift, dtype=dtype)[shift:]] for dtype in dtypes))
        table.update(triton_adam.Settings(1e-3, 0.9, 0.95, 1e-8, 0.1, True, 1), 1.0)


def fp8_launches(arch: int, reset: bool = False) -> None:
    """Rounding of tokens, and of the experts' weights along either axis; older GPUs have no FP8."""
    from megatron_blackmamba.ops.fp8.triton import by_rows

    weights = bf16(EXPERTS, 2 * HIDDEN, MODEL).detach()
    for x in (bf16(BATCH * LENGTH, MODEL).detach(), weights, weights.mT) if arch >= 90 else ():
        by_rows(x)


def decoding_launches(arch: int, rows: int = 1) -> None:
    """One token of some sequences: embedding, a Mamba layer, experts, and the head."""
    from megatron_blackmamba.ops.decoding import triton as decoding

    rank, wide, narrow = MODEL // 16, partial(torch.empty, device="meta"), bf16
    mamba = decoding.MambaStep(
        norm_D=wide(MODEL), in_proj=narrow(2 * INNER, MODEL), conv_weight_IK=wide(INNER, TAPS), conv_bias_I=wide(INNER),
        x_proj=narrow(rank + 2 * STATE, INNER), dt_proj_IR=narrow(INNER, rank), dt_bias_I=wide(INNER),
        A_IN=wide(INNER, STATE), D_I=wide(INNER), out_proj=narrow(MODEL, INNER), eps=1e-5,
    )  # fmt: skip
    experts = decoding.ExpertsStep(
        norm_D=wide(MODEL), router_ED=wide(EXPERTS, MODEL), router_bias_E=wide(EXPERTS),
        fc1_EGD=narrow(EXPERTS, 2 * HIDDEN, MODEL), fc2_EDF=narrow(EXPERTS, MODEL, HIDDEN), activation="silu", eps=1e-5,
    )  # fmt: skip
    tokens = torch.empty(rows, dtype=torch.long, device="meta")
    with torch.no_grad():
        stream = decoding.embedded(tokens, narrow(VOCABULARY, MODEL), 1.0)
        mamba(stream, wide(rows, TAPS - 1, INNER), wide(rows, INNER, STATE))
        experts(stream)
        decoding.product(stream, narrow(VOCABULARY, MODEL))


OPERATIONS = {
    "selective_scan": scan_launches,
    "selective_scan, recomputed": partial(scan_launches, keep=False),
    "ssd": ssd_launches,
    "delta": delta_launches,
    "delta, by channel": partial(delta_launches, by_channel=True),
    "causal_conv1d": convolution_launches,
    "sinkhorn": sinkhorn_launches,
    "sinkhorn, large": large_sinkhorn_launches,
    "order": order_launches,
    "gated": gated_launches,
    "norm": norm_launches,
    "gated norm": gated_norm_launches,
    "cross_entropy": cross_entropy_launches,
    "adam": adam_launches,
    "fp8": fp8_launches,
    "decoding, one": decoding_launches,
    "decoding, 64": partial(decoding_launches, rows=64),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    kernels = [k for arch in options.arch for run in OPERATIONS.values() for k in kernels_of(run, arch)]
    with suppress(ImportError):  # without NVRTC
        kernels += [k for arch in options.arch if arch >= 90 for k in cuda_kernels(arch)]
    if options.json:
        print(json.dumps([k.as_json() for k in kernels], indent=1))
    else:
        print(table(kernels))


def issue_slots(kernel: Kernel) -> tuple[float, float] | None:
    """Instructions, and issue slots that special functions fill (eight each): a state and token of a scan kernel, a
    logit of the router's one program."""
    constants = kernel.constants
    if states := int(constants.get("STATES", 0)):  # of a thread, in one loop
        return kernel.loop.instructions / states, 8 * kernel.loop.count("MUFU") / states
    if {"STEPS", "N", "BLOCK_I"} <= constants.keys():
        items = constants["STEPS"] * constants["N"] * constants["BLOCK_I"]
    elif kernel.name == "_find_offsets":
        items = constants["BLOCK_T"] * constants["BLOCK_E"]
    else:
        return None
    a_thread = items / (32 * kernel.warps)
    return kernel.loop.instructions / a_thread, 8 * kernel.loop.count("MUFU") / a_thread


def table(kernels: list[Kernel]) -> str:
    columns = ("sm", "warps", "registers", "spilled B", "shared B", "loop", "MUFU", "SHFL", "instr/item", "MUFU slots")
    lines = [f"{'kernel':<18}" + "".join(f"{name:>12}" for name in columns)]
    for k in kernels:
        cells = [k.arch, k.warps, k.registers, k.spilled_bytes, k.shared_bytes]
        cells += [k.loop.instructions, k.loop.count("MUFU"), k.loop.count("SHFL")]
        slots = [f"{x:.1f}" for x in issue_slots(k) or ()]
        lines.append(f"{k.name:<18}" + "".join(f"{cell:>12}" for cell in cells + slots))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
