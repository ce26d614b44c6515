// The arguments of the matrix-vector product, mirrored field by field in megatron_blackmamba/ops/matvec/cpp.py.
#pragma once
#include <cstdint>

#include "dots.h"

// y = x weight^T. x and y are fp32 and contiguous.
struct Matvec {
  Matrix weight;      // [O, I]
  int64_t B, threads;
  const float* x;     // [B, I]
  float* y;           // [B, O]
};
