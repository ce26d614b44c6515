// y = x / sqrt(mean(x^2) + eps) * weight for each token, forward and backward, in one pass over the tokens each.
//
// Each unit of tokens leaves its own part of the weight's gradient, so that sums do not depend on the number of threads.
#include "rms_norm.h"

#include <math.h>

#include "parallel.h"
#include "simd.h"

namespace {

constexpr int64_t ROWS_OF_A_UNIT = 64;  // as in megatron_blackmamba/ops/rms_norm/cpp.py

template <class T>
void forward_row(const RmsNorm& s, int64_t t) {
  const float* x = s.x + t * s.D;
  T* y = (T*)s.y + t * s.D;
  vfloat squares = {};
  for (int64_t i = 0; i < s.D; i += W) {
    const vfloat v = load(x + i, lanes_at(i, s.D));
    squares = fma(v, v, squares);
  }
  const float scale = 1.0f / sqrtf(sum(squares) / (float)s.D + s.eps);
  s.scale[t] = scale;
  for (int64_t i = 0; i < s.D; i += W) {
    const int n = lanes_at(i, s.D);
    store(y + i, load(x + i, n) * scale * load(s.weight + i, n), n);
  }
}

template <class T>
void backward_row(const RmsNorm& s, int64_t t, float* grad_weight) {
  const float *x = s.x + t * s.D, scale = s.scale[t];
  const T* grad_y = (const T*)s.grad_y + t * s.D;
  float* grad_x = s.grad_x + t * s.D;
  vfloat along_x = {};  // what only lengthens x does not change y
  for (int64_t i = 0; i < s.D; i += W) {
    const int n = lanes_at(i, s.D);
    const vfloat v = load(x + i, n), g = load(grad_y + i, n);
    along_x = fma(g * load(s.weight + i, n), v, along_x);
    store(grad_weight + i, fma(g, v * scale, load(grad_weight + i, n)), n);
  }
  const float back = sum(along_x) * scale * scale / (float)s.D;
  for (int64_t i = 0; i < s.D; i += W) {
    const int n = lanes_at(i, s.D);
    store(grad_x + i, (load(grad_y + i, n) * load(s.weight + i, n) - load(x + i, n) * back) * scale, n);
  }
}

}  // namespace

EXPORT(rms_norm_forward)(const RmsNorm* s) {
  for_rows(s->T, ROWS_OF_A_UNIT, s->threads, [s](int64_t t, int64_t) {
    s->is_bf16 ? forward_row<bfloat16>(*s, t) : forward_row<float>(*s, t);
  });
}

EXPORT(rms_norm_backward)(const RmsNorm* s) {
  for_rows(s->T, ROWS_OF_A_UNIT, s->threads, [s](int64_t t, int64_t unit) {
    float* grad_weight = s->grad_weight + unit * s->D;
    if (t == unit * ROWS_OF_A_UNIT) memset(grad_weight, 0, s->D * sizeof(float));
    s->is_bf16 ? backward_row<bfloat16>(*s, t, grad_weight) : backward_row<float>(*s, t, grad_weight);
  });
}
