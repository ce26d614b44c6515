// The arguments of one token's way through a block, mirrored field by field in megatron_blackmamba/ops/decoding/cpp.py.
#pragma once
#include <cstdint>

#include "dots.h"

// Shapes: B sequences (at most MAX_VECTORS), D model, I inner channels, N states, R rank of dt, K taps, E experts,
// F expert hidden. All is fp32 and contiguous but for the matrices, which may be bf16.

// residual += out_proj(scan(convolution(in_proj(norm(residual))))); window and state move on.
struct MambaStep {
  int64_t B, D, I, N, R, K, threads;
  float eps;
  const float* norm;                       // [D]
  Matrix in_proj;                          // [2I, D], rows [x | z]
  const float *conv_weight, *conv_bias;    // [K, I], [I]
  Matrix x_proj, dt_proj;                  // [R + 2N, I], rows [dt | B | C]; [I, R]
  const float *dt_bias, *A, *D_skip;       // [I], [I, N], [I]
  Matrix out_proj;                         // [D, I]
  float *residual, *window, *state;        // [B, D], [B, K - 1, I], [B, I, N]
  float* workspace;                        // [B, D + 2I + R + 2N]
};

// residual += out_proj(norm(scan(convolution(in_proj(norm(residual)))))), the inner norm being gated and by groups.
struct Mamba2Step {
  int64_t B, D, I, H, P, G, N, K, threads;  // H heads of P channels, in G groups; Q = I + 2GN convolved channels
  float eps;
  const float* norm;                         // [D]
  Matrix in_proj;                            // [I + Q + H, D], rows [z | x | B | C | dt]
  const float *conv_weight, *conv_bias;      // [K, Q], [Q]
  const float *dt_bias, *A, *D_skip;         // [H] each
  const float* gate_norm;                    // [I]
  Matrix out_proj;                           // [D, I]
  float *residual, *window, *state;          // [B, D], [B, K - 1, Q], [B, H, P, N]
  float* workspace;                          // [B, D + I + Q + H]
};

// residual += sigmoid(its router logit) * expert(norm(residual)), the expert being that of the largest logit or, with
// choice_bias, of the largest sum of that bias and the logit or its sigmoid.
struct ExpertsStep {
  int64_t B, D, E, F, gelu, bias_on_scores, threads;
  float eps;
  const float *norm, *router, *router_bias;  // [D], [E, D], [E]
  const float* choice_bias;                  // [E], or null
  Matrix fc1, fc2;                           // of the first expert: [2F, D], rows [gate | up]; [D, F]. Others follow.
  float* residual;                           // [B, D]
  float* workspace;                          // [B, D + F]
};
