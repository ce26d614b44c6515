// The arguments of the RMS norm, mirrored field by field in megatron_blackmamba/ops/rms_norm/cpp.py.
#pragma once
#include <cstdint>

// Shapes: T tokens, D channels, U units of ROWS_OF_A_UNIT tokens. Everything is contiguous; what has no other type is fp32.
struct RmsNorm {
  int64_t T, D;
  int64_t is_bf16;  // y and grad_y
  int64_t threads;
  float eps;
  const float *x, *weight;  // [T, D], [D]
  void* y;                  // [T, D]
  float* scale;             // [T], 1 / the root of the mean square

  // For the backward only.
  const void* grad_y;
  float *grad_x, *grad_weight;  // [T, D], [U, D]
};
