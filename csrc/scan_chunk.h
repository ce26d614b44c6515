// The recurrence of the selective scan over one chunk of tokens, forward and back again: where the scan spends its time.
//
// A few states of a block of channels stay in registers over all tokens of the chunk, so every number of states runs at
// the same speed per state.
#pragma once
#include "decay.h"
#include "rows.h"
#include "simd.h"

namespace {

constexpr int SLICE = 4;  // states held in registers at once; eight would not leave enough registers for the rest

// What a block of channels needs of each token of a chunk.
struct Chunk {
  Ahead ahead;
  int tokens;
  const uint8_t* reset;       // [token], or null
  const float *B_in, *C_out;  // [token][N]
  vfloat delta[CHUNK], delta_u[CHUNK], y[CHUNK];
};

struct BackwardChunk : Chunk {
  vfloat u[CHUNK], softplus_slope[CHUNK], grad_y[CHUNK];
  vfloat grad_gate[CHUNK];  // of z, but for the factor y
  vfloat grad_delta_u[CHUNK], grad_exponent[CHUNK];
  vfloat decay[CHUNK * SLICE], carried[CHUNK * SLICE];  // of each state, and what it leaves of the state before
};

// Takes SLICE states over the chunk and adds their part of y. The backward also keeps what it will need, and adds the
// gradient of C, lane by lane.
template <bool KEEP, class C>
INLINE void advance(C& c, const float* A, float* state, int64_t n, int64_t N, float* grad_C) {
  vfloat h[SLICE], a[SLICE];
#pragma GCC unroll 8
  for (int j = 0; j < SLICE; j++) h[j] = load(state + j * W), a[j] = load(A + j * W);
  for (int t = 0; t < c.tokens; t++) {
    if (c.reset && c.reset[t]) {
#pragma GCC unroll 8
      for (int j = 0; j < SLICE; j++) h[j] = vfloat{};
    }
    const float *B_in = c.B_in + t * N + n, *C_out = c.C_out + t * N + n;
    vfloat delta = c.delta[t], delta_u = c.delta_u[t], y = c.y[t];
    c.ahead.prefetch(t, n / SLICE * (KEEP ? 2 : 1), N / SLICE * (KEEP ? 2 : 1));
#pragma GCC unroll 8
    for (int j = 0; j < SLICE; j++) {
      vfloat left = decay(delta, a[j]), carried = left * h[j];
      if constexpr (KEEP) c.decay[t * SLICE + j] = left, c.carried[t * SLICE + j] = carried;
      h[j] = fma(delta_u, all(B_in[j]), carried);
      y = fma(h[j], all(C_out[j]), y);
      if constexpr (KEEP) {
        float* g = grad_C + (t * N + n + j) * W;
        store(g, fma(c.grad_y[t], h[j], load(g)));
      }
    }
    c.y[t] = y;
  }
#pragma GCC unroll 8
  for (int j = 0; j < SLICE; j++) store(state + j * W, h[j]);
}

// Takes the gradient of SLICE states back over the chunk.
INLINE void retreat(BackwardChunk& c, const float* A, float* grad_state, float* grad_A, int64_t n, int64_t N,
                    float* grad_B) {
  vfloat g[SLICE], gA[SLICE];
#pragma GCC unroll 8
  for (int j = 0; j < SLICE; j++) g[j] = load(grad_state + j * W), gA[j] = load(grad_A + j * W);
  for (int t = c.tokens - 1; t >= 0; t--) {
    const float *B_in = c.B_in + t * N + n, *C_out = c.C_out + t * N + n;
    vfloat delta = c.delta[t], delta_u = c.delta_u[t], grad_y = c.grad_y[t];
    vfloat grad_delta_u = c.grad_delta_u[t], grad_exponent = c.grad_exponent[t];
    c.ahead.prefetch(t, n / SLICE * 2 + 1, N / SLICE * 2);
#pragma GCC unroll 8
    for (int j = 0; j < SLICE; j++) {
      vfloat grad_h = fma(grad_y, all(C_out[j]), g[j]);
      float* gB = grad_B + (t * N + n + j) * W;
      store(gB, fma(grad_h, delta_u, load(gB)));
      grad_delta_u = fma(grad_h, all(B_in[j]), grad_delta_u);
      g[j] = grad_h * c.decay[t * SLICE + j];
      vfloat grad_log_decay = grad_h * c.carried[t * SLICE + j];
      grad_exponent = fma(grad_log_decay, load(A + j * W), grad_exponent);
      gA[j] = fma(grad_log_decay, delta, gA[j]);
    }
    c.grad_delta_u[t] = grad_delta_u;
    c.grad_exponent[t] = grad_exponent;
    if (c.reset && c.reset[t]) {
#pragma GCC unroll 8
      for (int j = 0; j < SLICE; j++) g[j] = vfloat{};
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < SLICE; j++) store(grad_state + j * W, g[j]), store(grad_A + j * W, gA[j]);
}

}  // namespace
