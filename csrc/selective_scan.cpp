// The selective scan of Mamba-1, forward and backward, in one pass over the activations each.
//
// The lanes of a vector are neighbouring channels. Time advances in chunks of 16 tokens; inside a chunk, eight states of
// a block of channels stay in registers over all its tokens, so every number of states runs at the same speed per state.
// The forward keeps the state before each chunk. The backward walks the chunks from the last to the first and computes
// the states inside a chunk again, which costs less than reading them from memory would.
//
// Sums over channels (the gradients of B and C) are kept per group of 128 channels and added up in a fixed order by the
// caller: the result does not depend on the number of threads.
#include "selective_scan.h"

#include "parallel.h"
#include "rows.h"
#include "simd.h"

namespace {

constexpr int SLICE = 8;  // states held in registers at once
constexpr int GROUP_BLOCKS = GROUP_CHANNELS / W;
constexpr int MAX_STATES = 64;

// What a block of channels needs of each token of a chunk.
struct Chunk {
  Ahead ahead;
  int tokens;
  const uint8_t* reset;       // [token], or null
  const float *B_in, *C_out;  // [token][N]
  vfloat delta[CHUNK], delta_u[CHUNK], y[CHUNK];
};

struct BackwardChunk : Chunk {
  vfloat u[CHUNK], softplus_slope[CHUNK], gate[CHUNK], grad_y[CHUNK];
  vfloat grad_delta_u[CHUNK], grad_exponent[CHUNK];
  vfloat before[CHUNK * SLICE], decay[CHUNK * SLICE];  // the state before each token, and what it is multiplied with
};

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
      vfloat decay = exp2(delta * a[j]);
      if constexpr (KEEP) c.before[t * SLICE + j] = h[j], c.decay[t * SLICE + j] = decay;
      h[j] = fma(decay, h[j], delta_u * B_in[j]);
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
      vfloat grad_log_decay = g[j] * c.before[t * SLICE + j];
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
        c.delta[t] = s.softplus ? softplus(dt) : dt;
        c.softplus_slope[t] = s.softplus ? sigmoid(dt) : all(1.0f);
        c.delta_u[t] = c.delta[t] * ut;
        c.y[t] = D * ut;
        c.grad_y[t] = grad_y.load(t);
        if (s.z) {
          vfloat zt = z.load(t);
          c.gate[t] = sigmoid(zt);
          c.grad_y[t] *= zt * c.gate[t];
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
        if (s.z) {
          vfloat silu_slope = c.gate[t] * fma(z.load(t), 1.0f - c.gate[t], all(1.0f));
          grad_z.store(t, grad_y.load(t) * c.y[t] * silu_slope);
        }
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
