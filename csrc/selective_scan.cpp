// The selective scan of Mamba-1, forward and backward, in one pass over the activations each.
//
// The lanes of a vector are neighbouring channels. Time advances in chunks of 16 tokens; scan_chunk.h is what happens
// inside one. The forward keeps the state before each chunk. The backward walks the chunks from the last to the first and
// computes the states inside a chunk again, which costs less than reading them from memory would.
//
// Sums over channels (the gradients of B and C) are kept per group of 128 channels and added up in a fixed order by the
// caller: the result does not depend on the number of threads.
#include "selective_scan.h"

#include "parallel.h"
#include "rows.h"
#include "scan_chunk.h"
#include "simd.h"

namespace {

constexpr int GROUP_BLOCKS = GROUP_CHANNELS / W;
constexpr int MAX_STATES = 64;

// [channel][state] <-> [block][state][lane]; lanes beyond the last channel are zero.
void to_lanes(float* lanes, const float* matrix, const Unit& unit, int64_t N, float scale) {
  memset(lanes, 0, sizeof(float) * unit.blocks * N * W);
  if (matrix)
    for (int64_t c = 0; c < unit.channels; c++)
      for (int64_t n = 0; n < N; n++) lanes[(c / W * N + n) * W + c % W] = matrix[c * N + n] * scale;
}

void from_lanes(float* matrix, const float* lanes, const Unit& unit, int64_t N) {
  for (int64_t c = 0; c < unit.channels; c++)
    for (int64_t n = 0; n < N; n++) matrix[c * N + n] = lanes[(c / W * N + n) * W + c % W];
}

INLINE vfloat per_channel(const float* values, int64_t channel, int lanes) {
  return values ? load(values + channel, lanes) : vfloat{};
}

INLINE void place(Chunk& c, const SelectiveScan& s, const Unit& unit, int64_t q) {
  int64_t token = q * CHUNK, row = unit.b * s.L + token;
  c.tokens = (int)(s.L - token < CHUNK ? s.L - token : CHUNK);
  c.reset = s.reset ? s.reset + row : nullptr;
  c.B_in = s.B_in + row * s.N;
  c.C_out = s.C_out + row * s.N;
}

float* checkpoint(const SelectiveScan& s, const Unit& unit, int64_t q) {
  const int64_t chunks = (s.L + CHUNK - 1) / CHUNK;
  return s.checkpoints + ((unit.b * chunks + q) * padded_channels(s.I) + unit.first) * s.N;
}

float* workspace(const SelectiveScan& s, const Unit& unit, int part) {
  return s.workspace + ((unit.b * 3 + part) * padded_channels(s.I) + unit.first) * s.N;
}

template <class T>
void forward_unit(const SelectiveScan& s, const Unit unit) {
  float *A = workspace(s, unit, 0), *state = workspace(s, unit, 1);
  to_lanes(A, s.A + unit.first * s.N, unit, s.N, LOG2_E);
  to_lanes(state, s.initial_state ? s.initial_state + (unit.b * s.I + unit.first) * s.N : nullptr, unit, s.N, 1.0f);
  Chunk c;
  for (int64_t q = 0; q * CHUNK < s.L; q++) {
    place(c, s, unit, q);
    if (s.checkpoints) memcpy(checkpoint(s, unit, q), state, sizeof(float) * unit.blocks * s.N * W);
    for (int k = 0; k < unit.blocks; k++) {
      const int64_t channel = unit.first + k * W;
      const int lanes = unit.lanes(k);
      c.ahead.count = 0;
      const Rows<T> u(s.u, s.u_strides, unit, q, k, 1, c.ahead);
      const Rows<T> delta(s.delta, s.delta_strides, unit, q, k, 1, c.ahead);
      const Rows<T> z(s.z, s.z_strides, unit, q, k, 1, c.ahead);
      const Rows<T> y(s.y, s.y_strides, unit, q, k, 1, c.ahead);
      const vfloat D = per_channel(s.D, channel, lanes), bias = per_channel(s.delta_bias, channel, lanes);
      for (int t = 0; t < c.tokens; t++) {
        vfloat ut = u.load(t), dt = delta.load(t) + bias;
        c.delta[t] = s.softplus ? softplus(dt) : dt;
        c.delta_u[t] = c.delta[t] * ut;
        c.y[t] = D * ut;
      }
      for (int64_t n = 0; n < s.N; n += SLICE)
        advance<false>(c, A + (k * s.N + n) * W, state + (k * s.N + n) * W, n, s.N, nullptr);
      for (int t = 0; t < c.tokens; t++) {
        vfloat yt = c.y[t];
        if (s.z) {
          vfloat zt = z.load(t);
          yt = yt * zt * sigmoid(zt);
        }
        y.store(t, yt);
      }
    }
  }
  from_lanes(s.final_state + (unit.b * s.I + unit.first) * s.N, state, unit, s.N);
}

template <class T>
void backward_unit(const SelectiveScan& s, const Unit unit) {
  float *A = workspace(s, unit, 0), *grad_state = workspace(s, unit, 1), *grad_A = workspace(s, unit, 2);
  alignas(64) float state[MAX_STATES * W], grad_B[CHUNK * MAX_STATES * W], grad_C[CHUNK * MAX_STATES * W];
  memset(s.grad_D + unit.b * s.I + unit.first, 0, sizeof(float) * unit.channels);
  memset(s.grad_delta_bias + unit.b * s.I + unit.first, 0, sizeof(float) * unit.channels);
  to_lanes(A, s.A + unit.first * s.N, unit, s.N, LOG2_E);
  const int64_t state_offset = (unit.b * s.I + unit.first) * s.N;
  to_lanes(grad_state, s.grad_final_state ? s.grad_final_state + state_offset : nullptr, unit, s.N, 1.0f);
  to_lanes(grad_A, nullptr, unit, s.N, 1.0f);
  BackwardChunk c;
  for (int64_t q = (s.L + CHUNK - 1) / CHUNK - 1; q >= 0; q--) {
    place(c, s, unit, q);
    for (int k = 0; k < unit.blocks; k++) {
      if (k % GROUP_BLOCKS == 0) {
        memset(grad_B, 0, sizeof(float) * c.tokens * s.N * W);
        memset(grad_C, 0, sizeof(float) * c.tokens * s.N * W);
      }
      const int64_t channel = unit.first + k * W;
      const int lanes = unit.lanes(k);
      c.ahead.count = 0;
      const Rows<T> u(s.u, s.u_strides, unit, q, k, -1, c.ahead);
      const Rows<T> delta(s.delta, s.delta_strides, unit, q, k, -1, c.ahead);
      const Rows<T> z(s.z, s.z_strides, unit, q, k, -1, c.ahead);
      const Rows<T> grad_y(s.grad_y, s.grad_y_strides, unit, q, k, -1, c.ahead);
      const Rows<T> grad_u(s.grad_u, s.grad_u_strides, unit, q, k, -1, c.ahead);
      const Rows<T> grad_delta(s.grad_delta, s.grad_delta_strides, unit, q, k, -1, c.ahead);
      const Rows<T> grad_z(s.grad_z, s.grad_z_strides, unit, q, k, -1, c.ahead);
      const vfloat D = per_channel(s.D, channel, lanes), bias = per_channel(s.delta_bias, channel, lanes);
      for (int t = 0; t < c.tokens; t++) {
        vfloat ut = u.load(t), dt = delta.load(t) + bias;
        c.u[t] = ut;
        c.softplus_slope[t] = all(1.0f);
        c.delta[t] = s.softplus ? softplus(dt, c.softplus_slope[t]) : dt;
        c.delta_u[t] = c.delta[t] * ut;
        c.y[t] = D * ut;
        c.grad_y[t] = grad_y.load(t);
        if (s.z) {
          vfloat zt = z.load(t), gate = sigmoid(zt), silu = zt * gate;
          c.grad_gate[t] = c.grad_y[t] * fma(silu, 1.0f - gate, gate);
          c.grad_y[t] *= silu;
        }
        c.grad_delta_u[t] = c.grad_exponent[t] = vfloat{};
      }
      memcpy(state, checkpoint(s, unit, q) + k * s.N * W, sizeof(float) * s.N * W);
      for (int64_t n = 0; n < s.N; n += SLICE) {
        const int64_t at = (k * s.N + n) * W;
        advance<true>(c, A + at, state + n * W, n, s.N, grad_C);
        retreat(c, A + at, grad_state + at, grad_A + at, n, s.N, grad_B);
      }
      vfloat grad_D = load(s.grad_D + unit.b * s.I + channel, lanes);
      vfloat grad_bias = load(s.grad_delta_bias + unit.b * s.I + channel, lanes);
      for (int t = 0; t < c.tokens; t++) {
        grad_u.store(t, fma(c.grad_delta_u[t], c.delta[t], c.grad_y[t] * D));
        vfloat grad_dt = fma(c.grad_delta_u[t], c.u[t], c.grad_exponent[t] * LN_2) * c.softplus_slope[t];
        grad_delta.store(t, grad_dt);
        grad_bias += grad_dt;
        grad_D = fma(c.grad_y[t], c.u[t], grad_D);
        if (s.z) grad_z.store(t, c.grad_gate[t] * c.y[t]);
      }
      store(s.grad_D + unit.b * s.I + channel, grad_D, lanes);
      store(s.grad_delta_bias + unit.b * s.I + channel, grad_bias, lanes);
      if (k % GROUP_BLOCKS == GROUP_BLOCKS - 1 || k == unit.blocks - 1) {
        const int64_t row = (channel / GROUP_CHANNELS * s.B + unit.b) * s.L + q * CHUNK;
        sums(s.grad_B + row * s.N, grad_B, c.tokens * s.N);
        sums(s.grad_C + row * s.N, grad_C, c.tokens * s.N);
      }
    }
  }
  from_lanes(s.grad_A + state_offset, grad_A, unit, s.N);
  from_lanes(s.grad_initial_state + state_offset, grad_state, unit, s.N);
}

}  // namespace

EXPORT(selective_scan_forward)(const SelectiveScan* s) {
  auto work = [s](int64_t i) { s->is_bf16 ? forward_unit<bfloat16>(*s, {*s, i}) : forward_unit<float>(*s, {*s, i}); };
  run_in_parallel(Unit::count(*s), (int)s->threads, work);
}

EXPORT(selective_scan_backward)(const SelectiveScan* s) {
  auto work = [s](int64_t i) { s->is_bf16 ? backward_unit<bfloat16>(*s, {*s, i}) : backward_unit<float>(*s, {*s, i}); };
  run_in_parallel(Unit::count(*s), (int)s->threads, work);
}
