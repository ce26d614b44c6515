// The arguments of the selective scan, mirrored field by field in megatron_blackmamba/ops/selective_scan/cpp.py.
#pragma once
#include <cstdint>

// Shapes: B batch, L length, I inner channels, N states (a multiple of 4, at most 64), Q chunks of 16 tokens,
// R groups of 128 channels, P the channels padded to whole vectors.
// u, delta, z, y and their gradients are fp32 or bf16 with channels contiguous and any batch and token strides;
// everything else is fp32 and contiguous.
struct SelectiveScan {
  int64_t B, L, I, N;
  int64_t is_bf16, softplus, threads;

  const void *u, *delta, *z;  // [B, L, I]; z may be null
  int64_t u_strides[2], delta_strides[2], z_strides[2];
  const float *A;              // [I, N]
  const float *B_in, *C_out;   // [B, L, N]
  const float *D, *delta_bias;  // [I] or null
  const float *initial_state;  // [B, I, N] or null
  const uint8_t *reset;        // [B, L] or null

  void* y;  // [B, L, I]
  int64_t y_strides[2];
  float* final_state;  // [B, I, N]
  float* checkpoints;  // [B, Q, P * N]: the state before each chunk; null where no gradient is wanted
  float* workspace;    // [B, 3, P * N]

  // For the backward only.
  const void* grad_y;
  int64_t grad_y_strides[2];
  const float* grad_final_state;  // [B, I, N] or null
  void *grad_u, *grad_delta, *grad_z;
  int64_t grad_u_strides[2], grad_delta_strides[2], grad_z_strides[2];
  float* grad_A;                  // [B, I, N]
  float *grad_B, *grad_C;         // [R, B, L, N]
  float *grad_D, *grad_delta_bias;  // [B, I]
  float* grad_initial_state;      // [B, I, N]
};
