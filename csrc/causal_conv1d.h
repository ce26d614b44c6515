// The arguments of the causal convolution, mirrored field by field in megatron_blackmamba/ops/causal_conv1d/cpp.py.
#pragma once
#include <cstdint>

// Shapes: B batch, L length, I inner channels, K taps (2 to 4), P the channels padded to whole vectors.
// x, y, the window and their gradients are fp32 or bf16 with channels contiguous and any batch and token strides;
// everything else is fp32 and contiguous.
struct CausalConv1d {
  int64_t B, L, I, K;
  int64_t is_bf16, silu, threads;

  const void* x;  // [B, L, I]
  int64_t x_strides[2];
  const void* initial_window;  // [B, K - 1, I] or null
  int64_t initial_window_strides[2];
  const float *weight, *bias;  // [K, P], [P]
  const uint8_t* reset;        // [B, L] or null
  void* y;                     // [B, L, I]
  int64_t y_strides[2];

  // For the backward only.
  const void* grad_y;
  int64_t grad_y_strides[2];
  void *grad_x, *grad_initial_window;
  int64_t grad_x_strides[2], grad_initial_window_strides[2];
  float *grad_weight, *grad_bias;  // [B, K, P], [B, P], zero at the start
  float* workspace;                // [B, K - 1, P], zero at the start
};
