// The arguments of the gated activation, mirrored field by field in megatron_blackmamba/ops/gated/cpp.py.
#pragma once
#include <cstdint>

// Shapes: T tokens, F hidden units. Everything is contiguous; activations are fp32 or bf16, weights fp32.
struct Gated {
  int64_t T, F;
  int64_t is_bf16, gelu, threads;
  const void* gate_up;   // [T, 2F], gate first
  const float* weights;  // [T], or null for ones
  void* y;               // [T, F]

  // For the backward only.
  const void* grad_y;    // [T, F]
  void* grad_gate_up;    // [T, 2F]
  float* grad_weights;   // [T] or null
};
