"""Newton–Schulz steps: a matrix with the same singular vectors, and singular values near 1.

Each step is a polynomial of odd powers. GPUs multiply in bf16, which is exact enough: singular values end within 0.3 of
1 in any precision.

Shapes: N matrices, R rows, C columns.
"""

import torch
from torch import Tensor

STEPS = {
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "jordan": ((3.4445, -4.7750, 2.0315),) * 5,
}
"""By name the factors of each step: `a x + b x³ + c x⁵` of every singular value. quintic ends nearer to 1."""
TINY = 1e-7
"""The least norm that a matrix is divided by, so that one of zeros stays so."""


def orthogonal(x_NRC: Tensor, steps: str = "quintic") -> Tensor:
    """Return each matrix made nearly orthogonal, in the precision of the argument."""
    given = x_NRC.dtype
    tall = x_NRC.shape[1] > x_NRC.shape[2]
    x = x_NRC.mT if tall else x_NRC  # the smaller square is multiplied
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=TINY)
    if x.is_cuda and given != torch.float64:
        x = x.bfloat16()
    for a, b, c in STEPS[steps]:
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(given)


def flops(rows: int, columns: int, steps: str = "quintic") -> int:
    """Return the FLOPs for one matrix."""
    small, large = sorted((rows, columns))
    return len(STEPS[steps]) * (4 * small**2 * large + 2 * small**3)
