"""Specifications of GPUs: memory, FLOP/s, links. Figures are the vendors'; other GPUs need a small YAML file."""

from pathlib import Path

from pydantic import Field, ValidationError

from megatron_blackmamba.settings import Section
from megatron_blackmamba.settings.yaml_files import read_yaml


class GpuError(ValueError):
    """A GPU that is not described; the message says how to."""


class Gpu(Section):
    """One GPU of a cluster, and its share of the links."""

    name: str
    memory_gib: float = Field(gt=0, description="GiB that a process can use")
    bf16_tflops: float = Field(gt=0, description="dense matrix products in bf16, peak TFLOP/s, without sparsity")
    fp32_tflops: float = Field(gt=0, description="matrix products in fp32 without TF32, peak TFLOP/s")
    fp8_tflops: float | None = Field(
        default=None, gt=0, description="dense matrix products in FP8, peak TFLOP/s, if the GPU has them"
    )
    nvlink_gb_s: float = Field(gt=0, description="GB/s to the GPUs of its node, one direction")
    network_gb_s: float = Field(gt=0, description="GB/s of its share of the node's network, one direction")
    memory_gb_s: float = Field(gt=0, description="GB/s that kernels reach, about 85% of the data sheet's")
    issue_t_s: float = Field(gt=0, description="10^12 instructions a second: multiprocessors x 128 x clock in THz")
    product_share: float = Field(
        default=0.75, gt=0, le=1, description="share of the peak that large products reach; default 0.75"
    )
    fp8_share: float | None = Field(
        default=None, gt=0, le=1, description="the same for products in FP8; default product_share"
    )

    def peak(self, precision: str) -> float:
        """Return FLOP/s of dense matrix products."""
        if precision == "fp64":
            raise GpuError(
                "training.precision=fp64 runs on CPUs only, and a plan is for GPUs. Plan with training.precision=fp32."
            )
        peaks = {"bf16": self.bf16_tflops, "fp8": self.fp8_tflops, "fp32": self.fp32_tflops}
        if (peak := peaks[precision]) is None:
            raise GpuError(
                f"{self.name} has no {precision} products. Plan for another GPU, or with kernels.linear=local."
            )
        return 1e12 * peak

    def reached(self, precision: str) -> float:
        """Return FLOP/s that large products reach."""
        share = self.fp8_share if precision == "fp8" else None
        return self.peak(precision) * (self.product_share if share is None else share)


FIELDS = {name: field for name, field in Gpu.model_fields.items() if field.description}
_H100 = Gpu(
    name="H100 SXM 80GB",
    memory_gib=79.6,
    bf16_tflops=989,
    fp8_tflops=1979,
    fp32_tflops=67,
    nvlink_gb_s=450,
    network_gb_s=50,
    memory_gb_s=3000,
    product_share=0.71,
    fp8_share=0.36,  # such that a step on an H200 takes its measured 1.04 times that in bf16
    issue_t_s=29.6,
)
_A100 = Gpu(
    name="A100 SXM 80GB",
    memory_gib=79.3,
    bf16_tflops=312,
    fp32_tflops=19.5,
    nvlink_gb_s=300,
    network_gb_s=25,
    memory_gb_s=1700,
    product_share=0.80,
    issue_t_s=19.5,
)
_H200 = {"name": "H200 SXM 141GB", "memory_gib": 139.8, "memory_gb_s": 4300}
_A100_40GB = {"name": "A100 SXM 40GB", "memory_gib": 39.4, "memory_gb_s": 1300}
KNOWN = {
    "h100": _H100,
    "h200": _H100.model_copy(update=_H200),
    "a100": _A100,
    "a100-40gb": _A100.model_copy(update=_A100_40GB),
}


def find(name: str) -> Gpu:
    """Return a known GPU, or one described in a YAML file with the fields of `Gpu`."""
    if name.lower() in KNOWN:
        return KNOWN[name.lower()]
    path = Path(name)
    if not path.is_file():
        raise GpuError(
            f"no GPU {name!r}: use {', '.join(KNOWN)}, or a YAML file with name, {', '.join(FIELDS)}"
            " (docs/planning.md explains them)"
        )
    try:
        return Gpu.model_validate(read_yaml(path))
    except ValidationError as error:
        problems = "; ".join(_described(p["loc"], p["msg"]) for p in error.errors())
        raise GpuError(f"{path}: {problems}") from None


def _described(place: tuple[int | str, ...], message: str) -> str:
    """Return a problem of a field, with the meaning of the field."""
    name = ".".join(map(str, place))
    return f"{name}: {message} ({FIELDS[name].description})" if name in FIELDS else f"{name}: {message}"
