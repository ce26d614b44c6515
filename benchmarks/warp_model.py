"""How long a scan kernel's main loop takes on one scheduler of a Hopper GPU, modelled from its machine code.

    python -m benchmarks.warp_model [--arch 90]

One scheduler issues one instruction a cycle, of a warp whose stall count has run out, whose barriers are clear and
whose pipe has room. Stall counts and barriers are read from the machine code; latencies and widths of the pipes are
those of CALIBRATION, which lists what the model says beside what was measured. It is always optimistic: it knows no
memory traffic of other warps, no instruction cache, and no last wave.

Needs cuda-bindings and NVRTC, which come with PyTorch for CUDA, or `pip install cuda-bindings nvidia-cuda-nvrtc`.
"""

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import _common

QUEUE = 32  # cycles of work that wait before the load and special-function pipes
LOOPS = 6
SLOT_MS = 0.107  # an issue slot for each state and token, 42 sequences of the 1.5B model, 132 processors, 1.755 GHz


@dataclass(frozen=True)
class Pipe:
    """An execution unit: cycles that an instruction occupies it, and cycles until its result is there."""

    name: str
    occupied: int
    latency: int


WIDTHS = {".128": 16, ".64": 8}
PIPES = (
    (("FFMA", "FMUL", "FADD"), Pipe("float", 1, 4)),
    (("HFMA2", "IMAD"), Pipe("multiply", 2, 4)),
    (("MUFU",), Pipe("special functions", 8, 20)),
    (("HMMA",), Pipe("tensor", 4, 20)),
    (("SHFL",), Pipe("load", 4, 24)),
    (("LDGSTS",), Pipe("load", 8, 20)),
    (("LDS",), Pipe("load", 0, 30)),
    (("STS", "STG"), Pipe("load", 0, 20)),
    (("LDG",), Pipe("load", 0, 800)),
    (("BAR",), Pipe("barrier", 2, 30)),
    (("U", "S2", "R2UR", "LDC"), Pipe("uniform", 2, 12)),
    (("",), Pipe("integer", 2, 4)),
)
"""The first whose prefix fits. A load or store of 0 cycles takes four for each 32 bits of a thread."""

CALIBRATION = (
    # kernel, warps of a scheduler, slots by the model, slots measured, where
    ("Triton chunk_parts", 4, 15.9, 16.0, "H200"),
    ("Triton segment_ends", 4, 10.5, 13.0, "H200"),
    ("Triton forward", 4, 21.5, 25.0, "H200"),
    ("Triton backward", 2, 63.0, 65.0, "H200"),
    ("CUDA scan_forward, two channels a thread", 3, 10.8, 13.1, "H100"),
    ("CUDA scan_backward", 2, 33.0, 36.2, "H100"),
)
"""Times at 42 sequences; waves that do not fill the GPU are counted in both columns."""


@dataclass(frozen=True)
class Instruction:
    text: str
    stall: int
    write_barrier: int
    read_barrier: int
    waits_for: int

    @property
    def operation(self) -> str:
        return re.sub(r"^@!?U?P\w+ ", "", self.text).split()[0]

    def pipe(self) -> Pipe:
        found = next(pipe for prefixes, pipe in PIPES if self.operation.startswith(prefixes))
        if found.occupied:
            return found
        width = next((cycles for suffix, cycles in WIDTHS.items() if suffix in self.operation), 4)
        return Pipe(found.name, width, found.latency)


def main_loop(code: str) -> list[Instruction]:
    """Return the loop with the largest share of exponentials, from `nvdisasm -c -hex` of one function."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    best: tuple[float, list[Instruction]] = (0.0, [])
    lines = iter(code.splitlines())
    for line in lines:
        if label := re.match(r"\.(L_x_\d+):", line.strip()):
            labels[label[1]] = len(instructions)
        elif low := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);\s*/\* 0x([0-9a-f]+) \*/", line):
            high = re.search(r"/\* 0x([0-9a-f]+) \*/", next(lines))
            assert high is not None
            control = int(high[1], 16) >> 41
            parts = (control & 15, control >> 5 & 7, control >> 8 & 7, control >> 11 & 63)
            instructions.append(Instruction(low[1], *parts))
            jump = re.search(r"BRA.*`\(\.(L_x_\d+)\)", low[1])
            begun = labels.get(jump[1], len(instructions)) if jump else len(instructions)
            if len(instructions) - begun > 20:
                body = instructions[begun:]
                share = sum("MUFU" in each.operation for each in body) / len(body)
                best = max(best, (share, body), key=lambda found: found[0])
    return best[1]


def cycles(body: Sequence[Instruction], warps: int, loops: int = LOOPS) -> tuple[float, Counter[str]]:
    """Return the cycles of a loop while so many warps share the scheduler, and what it waited for."""
    pipes, whole = [each.pipe() for each in body], len(body) * loops
    issued, ready = [0] * warps, [37 * warp for warp in range(warps)]
    barriers = [[0] * 8 for _ in range(warps)]
    free: Counter[str] = Counter()
    waited: Counter[str] = Counter()
    cycle = last = 0
    while min(issued) < whole:
        reason = "stall count"
        for warp in sorted(range(warps), key=lambda each: each != last):
            if issued[warp] >= whole or ready[warp] > cycle:
                continue
            at = issued[warp] % len(body)
            instruction, pipe = body[at], pipes[at]
            if any(instruction.waits_for >> b & 1 and barriers[warp][b] > cycle for b in range(6)):
                reason = "a result"
                continue
            if free[pipe.name] - cycle > (QUEUE if pipe.name in ("load", "special functions") else 0):
                reason = pipe.name
                continue
            start = max(free[pipe.name], cycle)
            free[pipe.name] = start + pipe.occupied
            for barrier, delay in ((instruction.write_barrier, pipe.latency), (instruction.read_barrier, 8)):
                if barrier < 6:
                    barriers[warp][barrier] = max(barriers[warp][barrier], free[pipe.name] + delay)
            ready[warp], last = cycle + max(1, instruction.stall), warp
            issued[warp] += 1
            break
        else:
            waited[reason] += 1
        cycle += 1
    return cycle / loops, waited


def main() -> None:
    from benchmarks.triton_resources import cuda_kernels

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, default=90)
    arguments = parser.parse_args()
    rows = []
    try:
        kernels = cuda_kernels(arguments.arch)
    except ImportError as error:
        parser.exit(2, f"NVRTC compiles the kernels, and comes with PyTorch for CUDA: {error}\n")
    for kernel in kernels:
        if not kernel.constants.get("STATES"):
            continue
        body, states = main_loop(kernel.code), int(kernel.constants["STATES"])
        for warps in (1, 2, 3):
            taken, waited = cycles(body, warps)
            slots = taken / (warps * states)
            rows.append(
                {
                    "kernel": kernel.name,
                    "channels": kernel.constants["CHANNELS"],
                    "warps of a scheduler": warps,
                    "instructions per state": len(body) / states,
                    "slots per state": slots,
                    "ms, 42 sequences": slots * SLOT_MS,
                    "waits most for": waited.most_common(1)[0][0],
                }
            )
    print(_common.table(rows))
    names = ("kernel", "warps of a scheduler", "slots, modelled", "slots, measured", "on")
    print("\n" + _common.table([dict(zip(names, each, strict=True)) for each in CALIBRATION]))


if __name__ == "__main__":
    main()
