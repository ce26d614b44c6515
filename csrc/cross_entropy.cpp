// The cross entropy of each token, forward and backward. What is not a number stays so.
#include "cross_entropy.h"

#include <math.h>

#include "parallel.h"
#include "simd.h"

namespace {

constexpr int64_t ROWS_OF_A_UNIT = 8;

// Of the last block of a row, lanes beyond its end count as the smallest number there is.
template <class T>
INLINE vfloat load_logits(const T* p, int n) {
  vfloat v = load(p, n);
  for (int i = n; i < W; i++) v[i] = -INFINITY;
  return v;
}

INLINE float value(const float* p) { return *p; }
INLINE float value(const bfloat16* p) { return load(p, 1)[0]; }

template <class T>
void forward_row(const CrossEntropy& s, int64_t t) {
  const T* x = (const T*)s.logits + t * s.V;
  vfloat largest = all(-INFINITY);
  for (int64_t i = 0; i < s.V; i += W) largest = max(largest, load_logits(x + i, lanes_at(i, s.V)));
  float top = largest[0];
  for (int i = 1; i < W; i++) top = largest[i] > top ? largest[i] : top;
  vfloat total = {};
  for (int64_t i = 0; i < s.V; i += W) {
    const vfloat v = load_logits(x + i, lanes_at(i, s.V));
    total += v == v ? exp2((v - top) * LOG2_E) : v;
  }
  s.log_sum[t] = top + logf(sum(total));
  s.loss[t] = s.log_sum[t] - value(x + s.labels[t]);
}

template <class T>
void backward_row(const CrossEntropy& s, int64_t t) {
  const T* x = (const T*)s.logits + t * s.V;
  T* grad = (T*)s.grad_logits + t * s.V;
  const int64_t label = s.labels[t];
  const float log_sum = s.log_sum[t], g = s.grad_loss[t] + (log_sum - log_sum);  // not a number where log_sum is not finite
  for (int64_t i = 0; i < s.V; i += W) {
    const int n = lanes_at(i, s.V);
    vfloat share = exp2((load(x + i, n) - log_sum) * LOG2_E);
    if (label >= i && label < i + W) share[label - i] -= 1.0f;
    store(grad + i, share * g, n);
  }
}

void for_tokens(const CrossEntropy& s, void (*row)(const CrossEntropy&, int64_t)) {
  for_rows(s.T, ROWS_OF_A_UNIT, s.threads, [&](int64_t t, int64_t) { row(s, t); });
}

}  // namespace

EXPORT(cross_entropy_forward)(const CrossEntropy* s) {
  for_tokens(*s, s->is_bf16 ? forward_row<bfloat16> : forward_row<float>);
}

EXPORT(cross_entropy_backward)(const CrossEntropy* s) {
  for_tokens(*s, s->is_bf16 ? backward_row<bfloat16> : backward_row<float>);
}
