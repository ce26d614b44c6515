// One token of a few sequences through a block: memory delivers the weights, all else happens while it does.
//
// A block is a few rounds of work shared among the threads, one for each matrix; what lies between two matrices is done
// by whoever has just computed those channels. Only the norm and the router are left to one thread.
#include "decoding.h"

#include "parallel.h"
#include "simd.h"

namespace {

// Pointers to the same place in the rows of a matrix [vectors, stride].
template <class T>
struct Places {
  T* at[MAX_VECTORS];
  Places(T* first, int64_t stride, int64_t vectors) {
    for (int c = 0; c < vectors; c++) at[c] = first + c * stride;
  }
};

void rms_norm(float* y, const float* x, const float* weight, int64_t size, float eps) {
  vfloat squares = {};
  for (int64_t i = 0; i < size; i += W) {
    const vfloat v = load(x + i, lanes_at(i, size));
    squares = fma(v, v, squares);
  }
  const vfloat scale = all(1.0f / __builtin_sqrtf(sum(squares) / (float)size + eps));
  for (int64_t i = 0; i < size; i += W) {
    const int lanes = lanes_at(i, size);
    store(y + i, load(x + i, lanes) * scale * load(weight + i, lanes), lanes);
  }
}

// A few channels of a sequence through the convolution, in place of x; the window moves on. A tap or a place in the
// window is `channels` floats behind the one before it.
void convolve(float* x, float* window, const float* weight, const float* bias, int64_t taps, int64_t channels, int lanes) {
  vfloat y = load(bias, lanes);
  for (int64_t k = 0; k < taps; k++) {
    const vfloat input = load(k + 1 < taps ? window + k * channels : x, lanes);
    y = fma(input, load(weight + k * channels, lanes), y);
    if (k > 0) store(window + (k - 1) * channels, input, lanes);
  }
  store(x, y * sigmoid(y), lanes);
}

// residual += matrix * x, the rows of one unit.
void add_product(const Matrix& matrix, int64_t unit, const float* x, int64_t stride, float* residual, int64_t B) {
  const int64_t first = unit * UNIT_ROWS, end = end_of_unit(unit, matrix.rows);
  float y[MAX_VECTORS * UNIT_ROWS];
  multiply(matrix, first, end, Places<const float>(x, stride, B).at, Places<float>(y, UNIT_ROWS, B).at, (int)B);
  for (int64_t b = 0; b < B; b++)
    for (int64_t d = first; d < end; d++) residual[b * matrix.rows + d] += y[b * UNIT_ROWS + d - first];
}

struct MambaWork {
  const MambaStep& s;
  const int64_t x_proj_rows = s.R + 2 * s.N;
  float *normed = s.workspace, *xz = normed + s.B * s.D, *dt_B_C = xz + s.B * 2 * s.I;  // each [B, its own size]

  void prepare() const {
    for (int64_t b = 0; b < s.B; b++) rms_norm(normed + b * s.D, s.residual + b * s.D, s.norm, s.D, s.eps);
  }

  // Units of x first, then those of z. The window of a channel is touched by its unit alone.
  void project_and_convolve(int64_t unit) const {
    const int64_t half = unit / units_of(s.I), index = unit % units_of(s.I);
    const int64_t first = index * UNIT_ROWS, end = end_of_unit(index, s.I), offset = half * s.I;
    multiply(s.in_proj, offset + first, offset + end, Places<const float>(normed, s.D, s.B).at,
             Places<float>(xz + offset + first, 2 * s.I, s.B).at, (int)s.B);
    if (half == 1) return;
    for (int64_t b = 0; b < s.B; b++)
      for (int64_t i = first; i < end; i += W)
        convolve(xz + b * 2 * s.I + i, s.window + b * (s.K - 1) * s.I + i, s.conv_weight + i, s.conv_bias + i, s.K, s.I,
                 lanes_at(i, end));
  }

  void project_dt_B_C(int64_t unit) const {
    const int64_t first = unit * FEW_ROWS, end = first + FEW_ROWS < x_proj_rows ? first + FEW_ROWS : x_proj_rows;
    multiply(s.x_proj, first, end, Places<const float>(xz, 2 * s.I, s.B).at,
             Places<float>(dt_B_C + first, x_proj_rows, s.B).at, (int)s.B);
  }

  void scan(int64_t unit) const {
    const int64_t first = unit * UNIT_ROWS, end = end_of_unit(unit, s.I);
    float delta[MAX_VECTORS * UNIT_ROWS];
    multiply(s.dt_proj, first, end, Places<const float>(dt_B_C, x_proj_rows, s.B).at,
             Places<float>(delta, UNIT_ROWS, s.B).at, (int)s.B);
    for (int64_t b = 0; b < s.B; b++)
      for (int64_t i = first; i < end; i += W)
        advance(b, i, lanes_at(i, end), delta + b * UNIT_ROWS + i - first);
  }

  // W channels of a sequence; y takes the place of x. Here a vector holds states of one channel.
  void advance(int64_t b, int64_t first, int lanes, const float* raw_delta) const {
    float *x = xz + b * 2 * s.I + first, *z = x + s.I;
    const float *B_in = dt_B_C + b * x_proj_rows + s.R, *C_out = B_in + s.N;
    const vfloat u = load(x, lanes), delta = softplus(load(raw_delta, lanes) + load(s.dt_bias + first, lanes));
    float log_decay[W], input[W], read[W];
    alignas(4 * W) float products[W * W];
    store(log_decay, delta * LOG2_E);
    store(input, delta * u);
    for (int i = 0; i < lanes; i++) {
      const float* A = s.A + (first + i) * s.N;
      float* state = s.state + (b * s.I + first + i) * s.N;
      vfloat y = {};
      for (int64_t n = 0; n < s.N; n += W) {
        const int states = lanes_at(n, s.N);
        const vfloat decay = exp2(load(A + n, states) * log_decay[i]);
        const vfloat h = fma(decay, load(state + n, states), load(B_in + n, states) * input[i]);
        store(state + n, h, states);
        y = fma(h, load(C_out + n, states), y);
      }
      store(products + i * W, y);
    }
    for (int i = lanes; i < W; i++) store(products + i * W, vfloat{});
    sums(read, products, W);
    const vfloat gate = load(z, lanes);
    store(x, fma(load(s.D_skip + first, lanes), u, load(read)) * gate * sigmoid(gate), lanes);
  }

  void project_out(int64_t unit) const { add_product(s.out_proj, unit, xz, 2 * s.I, s.residual, s.B); }

  static constexpr int FEW_ROWS = 16;  // of x_proj, which has few: every thread shall have some
};

struct Mamba2Work {
  const Mamba2Step& s;
  const int64_t Q = s.I + 2 * s.G * s.N, rows = s.I + Q + s.H;
  float *normed = s.workspace, *projected = normed + s.B * s.D;  // [B, D], [B, rows]

  void prepare() const {
    for (int64_t b = 0; b < s.B; b++) rms_norm(normed + b * s.D, s.residual + b * s.D, s.norm, s.D, s.eps);
  }

  void project_and_convolve(int64_t unit) const {
    const int64_t first = unit * UNIT_ROWS, end = end_of_unit(unit, rows);
    multiply(s.in_proj, first, end, Places<const float>(normed, s.D, s.B).at,
             Places<float>(projected + first, rows, s.B).at, (int)s.B);
    const int64_t begin = first < s.I ? 0 : first - s.I, stop = (end < s.I + Q ? end : s.I + Q) - s.I;
    for (int64_t b = 0; b < s.B; b++)
      for (int64_t q = begin; q < stop; q += W)
        convolve(projected + b * rows + s.I + q, s.window + b * (s.K - 1) * Q + q, s.conv_weight + q, s.conv_bias + q, s.K,
                 Q, lanes_at(q, stop));
  }

  // One head of every sequence.
  void scan(int64_t h) const {
    for (int64_t b = 0; b < s.B; b++) {
      const float raw_dt = projected[b * rows + s.I + Q + h] + s.dt_bias[h];
      float dt[W], decay[W];
      store(dt, softplus(all(raw_dt)));
      store(decay, exp2(all(dt[0] * s.A[h] * LOG2_E)));
      for (int64_t p = 0; p < s.P; p += W) advance(b, h, p, lanes_at(p, s.P), dt[0], all(decay[0]));
    }
  }

  // W channels of a head; the gated y takes the place of x. Here a vector holds states of one channel.
  void advance(int64_t b, int64_t h, int64_t p, int lanes, float dt, vfloat decay) const {
    const int64_t channel = h * s.P + p, GN = s.G * s.N;
    const float *z = projected + b * rows + channel, *B_in = projected + b * rows + 2 * s.I + h / (s.H / s.G) * s.N;
    float *x = projected + b * rows + s.I + channel, input[W], read[W];
    alignas(4 * W) float products[W * W];
    const vfloat u = load(x, lanes);
    store(input, u * dt);
    for (int i = 0; i < lanes; i++) {
      float* state = s.state + ((b * s.I) + channel + i) * s.N;
      vfloat y = {};
      for (int64_t n = 0; n < s.N; n += W) {
        const int states = lanes_at(n, s.N);
        const vfloat next = fma(decay, load(state + n, states), load(B_in + n, states) * input[i]);
        store(state + n, next, states);
        y = fma(next, load(B_in + GN + n, states), y);
      }
      store(products + i * W, y);
    }
    for (int i = lanes; i < W; i++) store(products + i * W, vfloat{});
    sums(read, products, W);
    const vfloat gate = load(z, lanes);
    store(x, fma(all(s.D_skip[h]), u, load(read)) * gate * sigmoid(gate), lanes);
  }

  void normalise() const {
    const int64_t channels = s.I / s.G;
    for (int64_t b = 0; b < s.B; b++)
      for (int64_t c = 0; c < s.I; c += channels) {
        float* y = projected + b * rows + s.I + c;
        rms_norm(y, y, s.gate_norm + c, channels, s.eps);
      }
  }

  void project_out(int64_t unit) const { add_product(s.out_proj, unit, projected + s.I, rows, s.residual, s.B); }
};

struct ExpertsWork {
  const ExpertsStep& s;
  float *normed = s.workspace, *hidden = normed + s.B * s.D;
  int experts = 0;  // chosen ones
  struct Group {
    int64_t expert;
    int rows = 0;
    int row[MAX_VECTORS];
  } groups[MAX_VECTORS];
  float scale[MAX_VECTORS];

  explicit ExpertsWork(const ExpertsStep& step) : s(step) {
    for (int b = 0; b < s.B; b++) {
      rms_norm(normed + b * s.D, s.residual + b * s.D, s.norm, s.D, s.eps);
      route(b);
    }
  }

  void route(int b) {
    const Matrix router = {s.router, s.E, s.D, s.D, 0};
    const float* x = normed + b * s.D;
    int64_t best = 0;
    float highest = 0;
    for (int64_t e = 0; e < s.E; e++) {
      float logit, *y = &logit;
      multiply(router, e, e + 1, &x, &y, 1);
      logit += s.router_bias[e];
      float rank = s.bias_on_scores ? score(logit) : logit;
      if (s.choice_bias) rank += s.choice_bias[e];
      if (e == 0 || rank > highest) best = e, highest = rank, scale[b] = logit;
    }
    scale[b] = score(scale[b]);
    int g = 0;
    while (g < experts && groups[g].expert != best) g++;
    if (g == experts) groups[experts++] = {best};
    groups[g].row[groups[g].rows++] = b;
  }

  static float score(float logit) {
    float lanes[W];
    store(lanes, sigmoid(all(logit)));
    return lanes[0];
  }

  static Matrix of_expert(Matrix m, int64_t expert) {
    m.data = (const char*)m.data + expert * m.rows * m.stride * (m.is_bf16 ? 2 : 4);
    return m;
  }

  void gate_and_up(int64_t unit) const {
    const Group& g = groups[unit / units_of(s.F)];
    const int64_t index = unit % units_of(s.F), first = index * UNIT_ROWS, end = end_of_unit(index, s.F);
    const float* x[MAX_VECTORS];
    for (int c = 0; c < g.rows; c++) x[c] = normed + g.row[c] * s.D;
    float gate[MAX_VECTORS * UNIT_ROWS], up[MAX_VECTORS * UNIT_ROWS];
    const Matrix fc1 = of_expert(s.fc1, g.expert);
    multiply(fc1, first, end, x, Places<float>(gate, UNIT_ROWS, g.rows).at, g.rows);
    multiply(fc1, s.F + first, s.F + end, x, Places<float>(up, UNIT_ROWS, g.rows).at, g.rows);
    for (int c = 0; c < g.rows; c++)
      for (int64_t i = 0; i < end - first; i += W) {
        const int lanes = lanes_at(i, end - first);
        const vfloat v = load(gate + c * UNIT_ROWS + i, lanes), activated = s.gelu ? gelu(v) : v * sigmoid(v);
        store(hidden + g.row[c] * s.F + first + i, activated * load(up + c * UNIT_ROWS + i, lanes), lanes);
      }
  }

  void down(int64_t unit) const {
    const Group& g = groups[unit / units_of(s.D)];
    const int64_t index = unit % units_of(s.D), first = index * UNIT_ROWS, end = end_of_unit(index, s.D);
    const float* x[MAX_VECTORS];
    for (int c = 0; c < g.rows; c++) x[c] = hidden + g.row[c] * s.F;
    float y[MAX_VECTORS * UNIT_ROWS];
    multiply(of_expert(s.fc2, g.expert), first, end, x, Places<float>(y, UNIT_ROWS, g.rows).at, g.rows);
    for (int c = 0; c < g.rows; c++)
      for (int64_t d = first; d < end; d++)
        s.residual[g.row[c] * s.D + d] += scale[g.row[c]] * y[c * UNIT_ROWS + d - first];
  }
};

}  // namespace

EXPORT(mamba_step)(const MambaStep* s) {
  const MambaWork work{*s};
  work.prepare();
  run_in_stretches(2 * units_of(s->I), s->threads, [&](int64_t unit) { work.project_and_convolve(unit); });
  const int64_t few = (work.x_proj_rows + work.FEW_ROWS - 1) / work.FEW_ROWS;
  run_in_stretches(few, s->threads, [&](int64_t unit) { work.project_dt_B_C(unit); });
  run_in_stretches(units_of(s->I), s->threads, [&](int64_t unit) { work.scan(unit); });
  run_in_stretches(units_of(s->D), s->threads, [&](int64_t unit) { work.project_out(unit); });
}

EXPORT(mamba2_step)(const Mamba2Step* s) {
  const Mamba2Work work{*s};
  work.prepare();
  run_in_stretches(units_of(work.rows), s->threads, [&](int64_t unit) { work.project_and_convolve(unit); });
  run_in_stretches(s->H, s->threads, [&](int64_t head) { work.scan(head); });
  work.normalise();
  run_in_stretches(units_of(s->D), s->threads, [&](int64_t unit) { work.project_out(unit); });
}

EXPORT(experts_step)(const ExpertsStep* s) {
  const ExpertsWork work(*s);
  run_in_stretches(work.experts * units_of(s->F), s->threads, [&](int64_t unit) { work.gate_and_up(unit); });
  run_in_stretches(work.experts * units_of(s->D), s->threads, [&](int64_t unit) { work.down(unit); });
}
