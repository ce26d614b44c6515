// The selective scan, forward and backward, in CUDA C++: bf16 in and out, 16 states in fp32, no atomics.
//
// A block owns 128 channels of one segment of one sequence. It takes four tokens a step; their rows come to shared
// memory STAGES - 1 steps ahead. The states before each step are saved in bf16 for the backward pass.
//
// Set by the compiler's options, each 0 or 1: HAS_Z (gate), HAS_RESET, SOFTPLUS, RAGGED (the length is no multiple of
// four), LOG_A (A is given as log(-A)), SAVE (forward: save states), and CHANNELS (forward: channels of a thread, 1 or 2).
// `cuda_launch.py` reads the constants below: how many threads a kernel has, and how many BYTES of shared memory.
// Letters: B batch, L length, I channels, N = 16 states, S segments, T = L / 4 steps, K = I / 128 blocks.
constexpr int STATES = 16, STEP = 4, WIDTH = 128, ROW = WIDTH * 2;  // ROW: bytes of a token's channels
constexpr float FORGET = -1e30f;  // added to an exponent, it makes the decay exactly zero

// softplus(x), accurate where exp(x) is tiny, as it is for time steps; and its slope.
DEVICE float softplus(float x, float* slope) {
  const float e = power_of_2(fminf(x, 20.0f) * LOG2E), one = 1.0f + e;
  const float series = e * fmaf(e, fmaf(e, fmaf(e, fmaf(e, 0.2f, -0.25f), 0.33333334f), -0.5f), 1.0f);
  const float logarithm = log_2(one) * LN2;
  if (slope) *slope = e * reciprocal(one);
  return x > 20.0f ? x : e < 0.03125f ? series : logarithm;
}
DEVICE float sigmoid(float x) { return reciprocal(1.0f + power_of_2(x * -LOG2E)); }

DEVICE void unpack(float* x, unsigned both) { x[0] = bits_to_float(both << 16); x[1] = bits_to_float(both & 0xffff0000u); }
DEVICE void load4(float* x, const float* from) { const float4 v = *(const float4*)from; x[0] = v.x; x[1] = v.y; x[2] = v.z; x[3] = v.w; }
DEVICE void load4(float* x, const bf16* from) { const uint2 v = *(const uint2*)from; unpack(x, v.x); unpack(x + 2, v.y); }
DEVICE void load8(float* x, const bf16* from) {
  const uint4 v = *(const uint4*)from;
  unpack(x, v.x); unpack(x + 2, v.y); unpack(x + 4, v.z); unpack(x + 6, v.w);
}
DEVICE void store4(float* to, const float* x) { *(float4*)to = make_float4(x[0], x[1], x[2], x[3]); }
DEVICE void store4(bf16* to, const float* x) { *(uint2*)to = make_uint2(pack(x[0], x[1]), pack(x[2], x[3])); }
DEVICE void store8(bf16* to, const float* x) {
  *(uint4*)to = make_uint4(pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
}

// This thread's 16 bytes of each step's rows, in global memory.
struct Piece {
  const char* at;
  long long step;  // bytes to the next step

  DEVICE_MEMBER Piece(const bf16* rows, long long stride, long long row, long long column, int direction)
      : at((const char*)(rows + row * stride + column)), step(direction * STEP * stride * 2) {}
  DEVICE_MEMBER void copy(char* to, bool present) { copy_later(to, at, present); at += step; }
};

// In a block's saved states, 16-byte pieces of neighbouring channels lie side by side: where states 8 half .. 8 half + 7
// of a channel begin.
DEVICE int saved_at(int channel, int half) { return (((channel & 1) * 2 + half) * (WIDTH / 2) + (channel >> 1)) * 8; }

// The rate of a decay in powers of two, from A, or with LOG_A from log(-A).
DEVICE float rate_of(float a) { return LOG2E * (LOG_A ? -power_of_2(a * LOG2E) : a); }

struct Forward {
  const bf16 *u, *delta, *z, *B, *C;
  const float *A, *D, *bias, *starts;  // [I, N], [I], [I], [B, S, N, I]; D, bias and starts may be null
  const unsigned char* reset;          // [B, L]
  bf16 *y, *raw_y, *states;            // raw_y: before the gate, with y's strides; states [B, T, I, N]
  float* end;                          // [B, N, I]
  long long L, I, segment;
  long long u_b, u_t, delta_b, delta_t, z_b, z_t, B_b, B_t, C_b, C_t, y_b, y_t;  // strides of sequences and tokens
};

constexpr int FORWARD_STAGES = 4, FORWARD_THREADS = WIDTH / CHANNELS;
constexpr int FORWARD_ROWS = HAS_Z ? 3 : 2, FORWARD_STAGE = FORWARD_ROWS * STEP * ROW + STEP * 64;
constexpr int FORWARD_BYTES = FORWARD_STAGES * FORWARD_STAGE;

KERNEL void __launch_bounds__(FORWARD_THREADS, CHANNELS == 1 ? 5 : 6) scan_forward(const Forward p) {
  SHARED_MEMORY(shared);
  const int thread = threadIdx.x, mine = thread * CHANNELS;
  const long long b = blockIdx.y, s = blockIdx.z, c0 = (long long)blockIdx.x * WIDTH;
  const long long first = s * p.segment, last = first + p.segment < p.L ? first + p.segment : p.L;
  float rate[CHANNELS][STATES], h[CHANNELS][STATES], skip[CHANNELS], bias[CHANNELS];
  UNROLL for (int c = 0; c < CHANNELS; ++c) {
    const long long i = c0 + mine + c;
    UNROLL for (int n = 0; n < STATES; n += 4) load4(rate[c] + n, p.A + i * STATES + n);
    UNROLL for (int n = 0; n < STATES; ++n) {
      rate[c][n] = rate_of(rate[c][n]);
      h[c][n] = p.starts ? p.starts[((b * gridDim.z + s) * STATES + n) * p.I + i] : 0.0f;
    }
    skip[c] = p.D ? p.D[i] : 0.0f;
    bias[c] = p.bias ? p.bias[i] : 0.0f;
  }

  // 16 threads copy a row, 64 the rows of a step; of 128 threads, each half copies half of the tensors.
  const int copier = thread & 63, row = copier >> 4, column = (copier & 15) * 8;
  const bool lower = thread < 64, upper = FORWARD_THREADS == 64 || !lower;
  Piece u(p.u + b * p.u_b + c0, p.u_t, first + row, column, 1), delta(p.delta + b * p.delta_b + c0, p.delta_t, first + row, column, 1);
  Piece z(p.z + b * p.z_b + c0, p.z_t, first + row, column, 1);
  const int token = copier >> 2 & 3, half = copier & 1;  // the first 16 copiers: two pieces of B, two of C a token
  const bool is_C = copier & 2;
  Piece BC((is_C ? p.C + b * p.C_b : p.B + b * p.B_b), is_C ? p.C_t : p.B_t, first + token, half * 8, 1);
  auto fetch = [&](long long t, int stage) {
    char* to = shared + stage * FORWARD_STAGE + copier * 16;
    if (t < last) {
      const bool present = !RAGGED || t + row < last;
      if (lower) u.copy(to, present);
      if (upper) delta.copy(to + STEP * ROW, present);
      if (HAS_Z && lower) z.copy(to + 2 * STEP * ROW, present);
      if (upper && copier < 16) BC.copy(to + FORWARD_ROWS * STEP * ROW, !RAGGED || t + token < last);
    }
    end_of_copies();
  };
  UNROLL for (int ahead = 0; ahead < FORWARD_STAGES - 1; ++ahead) fetch(first + ahead * STEP, ahead);

  const unsigned char* reset = HAS_RESET ? p.reset + b * p.L : nullptr;
  float forget[STEP], next_forget[STEP];
  auto look_for_resets = [&](long long t) {
    UNROLL for (int k = 0; k < STEP; ++k) next_forget[k] = HAS_RESET && t + k < last && reset[t + k] ? FORGET : 0.0f;
  };
  look_for_resets(first);
  bf16* y = p.y + b * p.y_b + first * p.y_t + c0 + mine;
  bf16* raw_y = SAVE && HAS_Z ? p.raw_y + b * p.y_b + first * p.y_t + c0 + mine : nullptr;
  bf16* states = SAVE ? p.states + ((b * ((p.L + STEP - 1) / STEP) + first / STEP) * p.I + c0) * STATES : nullptr;
  int stage = 0;
#pragma unroll 1
  for (long long t = first; t < last; t += STEP) {
    wait_for_all_copies_but<FORWARD_STAGES - 2>();
    __syncthreads();
    fetch(t + (FORWARD_STAGES - 1) * STEP, stage == 0 ? FORWARD_STAGES - 1 : stage - 1);
    UNROLL for (int k = 0; k < STEP; ++k) forget[k] = next_forget[k];
    if (HAS_RESET) look_for_resets(t + STEP);
    if (SAVE) {
      UNROLL for (int c = 0; c < CHANNELS; ++c) {
        store8(states + saved_at(mine + c, 0), h[c]);
        store8(states + saved_at(mine + c, 1), h[c] + 8);
      }
      states += p.I * STATES;
    }
    const char* here = shared + stage * FORWARD_STAGE;
    UNROLL for (int k = 0; k < STEP; ++k) {
      const bool inside = !RAGGED || t + k < last;
      float dt[2], us[2], zs[2], in[CHANNELS], ys[CHANNELS];
      auto load = [&](float* x, int tensor) {
        const bf16* from = (const bf16*)(here + (tensor * STEP + k) * ROW) + mine;
        if (CHANNELS == 2) unpack(x, *(const unsigned*)from);
        else x[0] = bits_to_float((unsigned)*from << 16);
      };
      load(us, 0);
      load(dt, 1);
      if (HAS_Z) load(zs, 2);
      UNROLL for (int c = 0; c < CHANNELS; ++c) {
        dt[c] += bias[c];
        if (SOFTPLUS) dt[c] = softplus(dt[c], nullptr);
        if (!inside) dt[c] = 0.0f;  // a token without a time step does not change the state
        in[c] = dt[c] * us[c];
        ys[c] = skip[c] * us[c];
      }
      const bf16* BC_k = (const bf16*)(here + FORWARD_ROWS * STEP * ROW + k * 64);
      UNROLL for (int n = 0; n < STATES; n += 8) {
        float B[8], C[8];
        load8(B, BC_k + n);
        load8(C, BC_k + STATES + n);
        UNROLL for (int c = 0; c < CHANNELS; ++c) UNROLL for (int j = 0; j < 8; ++j) {
          const float exponent = HAS_RESET ? fmaf(dt[c], rate[c][n + j], forget[k]) : dt[c] * rate[c][n + j];
          h[c][n + j] = fmaf(power_of_2(exponent), h[c][n + j], in[c] * B[j]);
          ys[c] = fmaf(h[c][n + j], C[j], ys[c]);
        }
      }
      auto store = [&](bf16* to) {
        if (!inside) return;
        if (CHANNELS == 2) *(unsigned*)to = pack(ys[0], ys[CHANNELS - 1]);
        else *to = (bf16)pack(ys[0], 0.0f);
      };
      if (SAVE && HAS_Z) { store(raw_y); raw_y += p.y_t; }
      if (HAS_Z) UNROLL for (int c = 0; c < CHANNELS; ++c) ys[c] *= zs[c] * sigmoid(zs[c]);
      store(y);
      y += p.y_t;
    }
    stage = stage == FORWARD_STAGES - 1 ? 0 : stage + 1;
  }
  if (last == p.L) UNROLL for (int c = 0; c < CHANNELS; ++c) UNROLL for (int n = 0; n < STATES; ++n)
    p.end[(b * STATES + n) * p.I + c0 + mine + c] = h[c][n];
}

// The backward pass. Let G[t] be the gradient of the state before token t, a = exp(delta A) and g = dy silu(z):
//   dh[t] = G[t + 1] + g[t] C[t]        G[t] = a[t] dh[t]
// A thread owns four channels x four states: lane = 8 q + w has channels 4 w .. 4 w + 3 of its warp's 32 and states
// 4 q .. 4 q + 3. What belongs to a channel alone is computed once: by lane q for token q of the step.
struct Backward {
  const bf16 *u, *delta, *z, *B, *C, *dy, *raw_y, *states;
  const float *A, *D, *bias, *ends;  // ends: the gradient of the state after each segment, [B, S, N, I], or null
  const unsigned char* reset;
  bf16 *du, *ddelta, *dz;
  float *dBC, *dA, *dD, *dbias, *dstart;  // [K, B, L, 2N], [B, S, N, I], [B, S, I] twice, [B, N, I]
  long long L, I, segment;
  long long u_b, u_t, delta_b, delta_t, z_b, z_t, B_b, B_t, C_b, C_t, dy_b, dy_t, raw_b, raw_t, du_b, du_t, dz_b, dz_t;
};

constexpr int BACKWARD_STAGES = 3, BACKWARD_THREADS = 128, WARPS = 4;
constexpr int BACKWARD_ROWS = HAS_Z ? 5 : 3;  // u, delta, dy; z and y before the gate
constexpr int BC_AT = BACKWARD_ROWS * STEP * ROW, STATES_AT = BC_AT + STEP * 64;
constexpr int BACKWARD_STAGE = STATES_AT + WIDTH * STATES * 2;
constexpr int TOKEN = 32;                                // floats of a warp's channels
constexpr int OF_WARP = 5 * STEP * TOKEN;                // delta, input and g; sums over the states of two
constexpr int SUMS = 2 * WARPS * STEP * TOKEN;           // a warp's two halves of dB and dC
constexpr int BACKWARD_BYTES = BACKWARD_STAGES * BACKWARD_STAGE + (WARPS * OF_WARP + SUMS) * 4;

// The sum over the four lanes that share w: lane q receives that of channel q.
DEVICE float sum_over_states(const float* x, bool odd, bool upper) {
  const float low = (upper ? x[2] : x[0]) + shuffle_xor(upper ? x[0] : x[2], 16);
  const float high = (upper ? x[3] : x[1]) + shuffle_xor(upper ? x[1] : x[3], 16);
  return (odd ? high : low) + shuffle_xor(odd ? low : high, 8);
}
// A matrix product drops the last 13 bits; half of their unit first makes that a rounding.
DEVICE float round_to_tf32(float x) { return bits_to_float(float_to_bits(x) + 0x1000u); }

KERNEL void __launch_bounds__(BACKWARD_THREADS, 2) scan_backward(const Backward p) {
  SHARED_MEMORY(shared);
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, q = lane >> 3, w = lane & 7;
  const int mine = warp * 32 + w * 4;
  const bool odd = lane & 8, upper = lane & 16;
  const float pick_low = lane >> 2 == 0 ? 1.0f : 0.0f, pick_high = lane >> 2 == 1 ? 1.0f : 0.0f;
  const long long b = blockIdx.y, s = blockIdx.z, c0 = (long long)blockIdx.x * WIDTH;
  const long long first = s * p.segment, last = first + p.segment < p.L ? first + p.segment : p.L;
  const long long segment_BS = b * gridDim.z + s;
  float rate[4][4], G[4][4], dA[4][4], skip[4], bias[4], dD[4], dbias[4];
  UNROLL for (int r = 0; r < 4; ++r) {
    const long long i = c0 + mine + r;
    load4(rate[r], p.A + i * STATES + q * 4);
    UNROLL for (int j = 0; j < 4; ++j) {
      rate[r][j] = rate_of(rate[r][j]);
      G[r][j] = p.ends ? p.ends[(segment_BS * STATES + q * 4 + j) * p.I + i] : 0.0f;
      dA[r][j] = 0.0f;
    }
    skip[r] = p.D ? p.D[i] : 0.0f;
    bias[r] = p.bias ? p.bias[i] : 0.0f;
    dD[r] = dbias[r] = 0.0f;
  }

  const int copier = thread & 63, row = copier >> 4, column = (copier & 15) * 8;
  const bool lower = thread < 64;
  const long long steps = (last - first + STEP - 1) / STEP, begin = first + (steps - 1) * STEP;
  // Each half of the block copies half of the rows: u, z and raw y; delta, dy, and B and C.
  const int token = copier >> 2 & 3, half = copier & 1;
  const bool is_C = copier & 2;
  Piece one(lower ? p.u + b * p.u_b + c0 : p.delta + b * p.delta_b + c0, lower ? p.u_t : p.delta_t, begin + row, column, -1);
  Piece two(lower ? p.z + b * p.z_b + c0 : p.dy + b * p.dy_b + c0, lower ? p.z_t : p.dy_t, begin + row, column, -1);
  Piece three(lower ? p.raw_y + b * p.raw_b + c0 : is_C ? p.C + b * p.C_b : p.B + b * p.B_b, lower ? p.raw_t : is_C ? p.C_t : p.B_t,
              begin + (lower ? row : token), lower ? column : half * 8, -1);
  const long long all_steps = (p.L + STEP - 1) / STEP;
  const char* saved = (const char*)(p.states + ((b * all_steps + begin / STEP) * p.I + c0) * STATES) + thread * 16;
  const int to_one = (lower ? 0 : STEP * ROW) + copier * 16, to_two = (lower ? 3 : 2) * STEP * ROW + copier * 16;
  const int to_three = (lower ? 4 * STEP * ROW : BC_AT) + copier * 16;
  auto fetch = [&](long long t, int stage) {
    char* to = shared + stage * BACKWARD_STAGE;
    if (t >= first) {
      const bool present = !RAGGED || t + row < last;
      one.copy(to + to_one, present);
      if (HAS_Z || !lower) two.copy(to + to_two, present);
      if (lower ? HAS_Z : copier < 16) three.copy(to + to_three, lower ? present : !RAGGED || t + token < last);
      copy_later(to + STATES_AT + thread * 16, saved);
      copy_later(to + STATES_AT + thread * 16 + 2048, saved + 2048);
      saved -= p.I * STATES * 2;
    }
    end_of_copies();
  };
  UNROLL for (int ahead = 0; ahead < BACKWARD_STAGES - 1; ++ahead) fetch(begin - ahead * STEP, ahead);

  const unsigned char* reset = HAS_RESET ? p.reset + b * p.L : nullptr;
  float forget[STEP], next_forget[STEP];
  auto look_for_resets = [&](long long t) {
    UNROLL for (int k = 0; k < STEP; ++k)
      next_forget[k] = HAS_RESET && t >= first && t + k < last && reset[t + k] ? FORGET : 0.0f;
  };
  look_for_resets(begin);
  float* of_warp = (float*)(shared + BACKWARD_STAGES * BACKWARD_STAGE) + warp * OF_WARP;
  float *deltas = of_warp, *inputs = of_warp + STEP * TOKEN, *gs = of_warp + 2 * STEP * TOKEN;
  float *dinputs = of_warp + 3 * STEP * TOKEN, *ddeltas = of_warp + 4 * STEP * TOKEN;
  float* sums = (float*)(shared + BACKWARD_STAGES * BACKWARD_STAGE) + WARPS * OF_WARP;
  const int own = q * TOKEN + w * 4;  // this lane's token and channels in one of those
  bf16 *du = p.du + b * p.du_b + (begin + q) * p.du_t + c0 + mine, *ddelta = p.ddelta + b * p.du_b + (begin + q) * p.du_t + c0 + mine;
  bf16* dz = HAS_Z ? p.dz + b * p.dz_b + (begin + q) * p.dz_t + c0 + mine : nullptr;
  float* dBC = p.dBC + ((blockIdx.x * (long long)gridDim.y + b) * p.L + begin) * 2 * STATES + thread;
  int stage = 0;
#pragma unroll 1
  for (long long t = begin; t >= first; t -= STEP) {
    wait_for_all_copies_but<BACKWARD_STAGES - 2>();
    __syncthreads();
    fetch(t - (BACKWARD_STAGES - 1) * STEP, stage == 0 ? BACKWARD_STAGES - 1 : stage - 1);
    UNROLL for (int k = 0; k < STEP; ++k) forget[k] = next_forget[k];
    if (HAS_RESET) look_for_resets(t - STEP);
    const char* here = shared + stage * BACKWARD_STAGE;
    const bool inside = !RAGGED || t + q < last;
    auto row_of = [&](int tensor) { return (const bf16*)(here + (tensor * STEP + q) * ROW) + mine; };
    float u4[4], delta4[4], slope4[4];
    {
      float in4[4], g4[4], z4[4], raw4[4];
      load4(u4, row_of(0));
      load4(delta4, row_of(1));
      load4(g4, row_of(2));
      if (HAS_Z) { load4(z4, row_of(3)); load4(raw4, row_of(4)); }
      UNROLL for (int r = 0; r < 4; ++r) {
        delta4[r] += bias[r];
        slope4[r] = 1.0f;
        if (SOFTPLUS) delta4[r] = softplus(delta4[r], &slope4[r]);
        if (!inside) delta4[r] = slope4[r] = 0.0f;
        in4[r] = delta4[r] * u4[r];
        if (HAS_Z) {
          const float gate = sigmoid(z4[r]), silu = z4[r] * gate;
          raw4[r] *= g4[r] * fmaf(silu, 1.0f - gate, gate);  // the gradient of z
          g4[r] *= silu;
        }
        dD[r] = fmaf(g4[r], u4[r], dD[r]);
      }
      if (HAS_Z && inside) store4(dz, raw4);
      store4(deltas + own, delta4);
      store4(inputs + own, in4);
      store4(gs + own, g4);
    }
    __syncwarp();
    const bf16* BC = (const bf16*)(here + BC_AT);
    float h[STEP + 1][4][4], a[STEP][4][4];  // the states before each token and after the last; the decays
    UNROLL for (int r = 0; r < 4; ++r) load4(h[0][r], (const bf16*)(here + STATES_AT) + saved_at(mine + r, q >> 1) + (q & 1) * 4);
    UNROLL for (int k = 0; k < STEP; ++k) {
      float dt[4], in[4], B[4];
      load4(dt, deltas + k * TOKEN + w * 4);
      load4(in, inputs + k * TOKEN + w * 4);
      load4(B, BC + k * 2 * STATES + q * 4);
      UNROLL for (int r = 0; r < 4; ++r) UNROLL for (int j = 0; j < 4; ++j) {
        a[k][r][j] = power_of_2(HAS_RESET ? fmaf(dt[r], rate[r][j], forget[k]) : dt[r] * rate[r][j]);
        h[k + 1][r][j] = fmaf(a[k][r][j], h[k][r][j], in[r] * B[j]);
      }
    }
    UNROLL for (int k = STEP - 1; k >= 0; --k) {
      float dt[4], in[4], g[4], B[4], C[4], dB[4] = {0.0f, 0.0f, 0.0f, 0.0f}, dC[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      float din[4] = {0.0f, 0.0f, 0.0f, 0.0f}, ddt[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      load4(dt, deltas + k * TOKEN + w * 4);
      load4(in, inputs + k * TOKEN + w * 4);
      load4(g, gs + k * TOKEN + w * 4);
      load4(B, BC + k * 2 * STATES + q * 4);
      load4(C, BC + k * 2 * STATES + STATES + q * 4);
      UNROLL for (int r = 0; r < 4; ++r) UNROLL for (int j = 0; j < 4; ++j) {
        const float dh = fmaf(g[r], C[j], G[r][j]);
        dB[j] = fmaf(dh, in[r], dB[j]);
        dC[j] = fmaf(h[k + 1][r][j], g[r], dC[j]);
        din[r] = fmaf(dh, B[j], din[r]);
        G[r][j] = a[k][r][j] * dh;
        const float through_decay = G[r][j] * h[k][r][j];
        dA[r][j] = fmaf(through_decay, dt[r], dA[r][j]);
        ddt[r] = fmaf(through_decay, rate[r][j], ddt[r]);
      }
      dinputs[k * TOKEN + w * 4 + q] = sum_over_states(din, odd, upper);
      ddeltas[k * TOKEN + w * 4 + q] = sum_over_states(ddt, odd, upper);
      // The product's first two columns are the sums over four lanes: of states 0 and 2, and 1 and 3 in the lower rows.
      float sum_B[4], sum_C[4];
      UNROLL for (int j = 0; j < 4; ++j) { dB[j] = round_to_tf32(dB[j]); dC[j] = round_to_tf32(dC[j]); }
      matrix_product(sum_B, dB, pick_low, pick_high);
      matrix_product(sum_C, dC, pick_low, pick_high);
      if ((lane & 3) == 0) {
        float* to = sums + (lane >> 2 & 1) * (SUMS / 2) + (warp * STEP + k) * TOKEN + q * 4;
        const float in_order_B[4] = {sum_B[0], sum_B[2], sum_B[1], sum_B[3]}, in_order_C[4] = {sum_C[0], sum_C[2], sum_C[1], sum_C[3]};
        store4(to, in_order_B);
        store4(to + STATES, in_order_C);
      }
    }
    __syncwarp();
    {
      float din4[4], ddt4[4], g4[4], out[4];
      load4(din4, dinputs + own);
      load4(ddt4, ddeltas + own);
      load4(g4, gs + own);
      UNROLL for (int r = 0; r < 4; ++r) out[r] = fmaf(din4[r], delta4[r], g4[r] * skip[r]);
      if (inside) store4(du, out);
      UNROLL for (int r = 0; r < 4; ++r) {
        out[r] = fmaf(ddt4[r], LN2, din4[r] * u4[r]) * slope4[r];
        dbias[r] += out[r];
      }
      if (inside) store4(ddelta, out);
    }
    __syncthreads();
    float sum = 0.0f;
    UNROLL for (int part = 0; part < 2 * WARPS; ++part) sum += sums[part * STEP * TOKEN + thread];
    if (!RAGGED || t + warp < last) *dBC = sum;
    du -= STEP * p.du_t;
    ddelta -= STEP * p.du_t;
    if (HAS_Z) dz -= STEP * p.dz_t;
    dBC -= STEP * 2 * STATES;
    stage = stage == BACKWARD_STAGES - 1 ? 0 : stage + 1;
  }
  UNROLL for (int r = 0; r < 4; ++r) {
    const long long i = c0 + mine + r;
    UNROLL for (int j = 0; j < 4; ++j) {
      p.dA[(segment_BS * STATES + q * 4 + j) * p.I + i] = dA[r][j];
      if (s == 0) p.dstart[(b * STATES + q * 4 + j) * p.I + i] = G[r][j];
    }
    dD[r] += shuffle_xor(dD[r], 8);  // each lane q has summed its own tokens
    dD[r] += shuffle_xor(dD[r], 16);
    dbias[r] += shuffle_xor(dbias[r], 8);
    dbias[r] += shuffle_xor(dbias[r], 16);
    if (q == 0) {
      p.dD[segment_BS * p.I + i] = dD[r];
      p.dbias[segment_BS * p.I + i] = dbias[r];
    }
  }
}

// Add up the blocks' parts of dB and dC. A thread owns four numbers of one token.
struct SumOfBlocks {
  const float* parts;  // [K, tokens, 2N]
  bf16* dBC;           // [tokens, 2N]
  long long blocks, tokens;
};
constexpr int SUM_THREADS = 256;
KERNEL void __launch_bounds__(SUM_THREADS) sum_of_blocks(const SumOfBlocks p) {
  const long long at = ((long long)blockIdx.x * SUM_THREADS + threadIdx.x) * 4, size = p.tokens * 2 * STATES;
  if (at >= size) return;
  float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f}, part[4];
  for (long long block = 0; block < p.blocks; ++block) {
    load4(part, p.parts + block * size + at);
    UNROLL for (int j = 0; j < 4; ++j) sum[j] += part[j];
  }
  store4(p.dBC + at, sum);
}
