// The arguments of the matrix-vector product, mirrored field by field in megatron_blackmamba/ops/matvec.py.
#pragma once
#include <cstdint>

// y = x weight^T. weight is fp32 or bf16 with contiguous rows; x and y are fp32 and contiguous.
struct Matvec {
  int64_t B, O, I;  // vectors, rows, columns
  int64_t is_bf16, threads;
  const void* weight;  // [O, I]
  int64_t weight_stride;
  const float* x;  // [B, I]
  float* y;        // [B, O]
};
