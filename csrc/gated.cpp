// y = activation(gate) * up * weight of the token, forward and backward, in one pass each.
#include "gated.h"

#include "parallel.h"
#include "simd.h"

namespace {

constexpr int64_t ROWS_OF_A_UNIT = 16;

struct Silu {
  vfloat value, slope;
  INLINE Silu at(vfloat x) {
    const vfloat s = sigmoid(x);
    return {x * s, s * fma(x, 1.0f - s, all(1.0f))};
  }
};

struct Gelu {
  vfloat value, slope;
  INLINE Gelu at(vfloat x) {
    const vfloat below = normal_distribution(x);
    const vfloat density = exp2(max(x * x * (-0.5f * LOG2_E), all(-126.0f))) * 0.39894228f;
    return {x * below, fma(x, density, below)};
  }
};

template <class T, class Activation>
void forward_row(const Gated& s, int64_t t) {
  const T *gate = (const T*)s.gate_up + t * 2 * s.F, *up = gate + s.F;
  T* y = (T*)s.y + t * s.F;
  const float weight = s.weights ? s.weights[t] : 1.0f;
  for (int64_t i = 0; i < s.F; i += W) {
    const int n = lanes_at(i, s.F);
    store(y + i, Activation::at(load(gate + i, n)).value * load(up + i, n) * weight, n);
  }
}

template <class T, class Activation>
void backward_row(const Gated& s, int64_t t) {
  const T *gate = (const T*)s.gate_up + t * 2 * s.F, *up = gate + s.F;
  const T* grad_y = (const T*)s.grad_y + t * s.F;
  T *grad_gate = (T*)s.grad_gate_up + t * 2 * s.F, *grad_up = grad_gate + s.F;
  const float weight = s.weights ? s.weights[t] : 1.0f;
  vfloat grad_weight = {};
  for (int64_t i = 0; i < s.F; i += W) {
    const int n = lanes_at(i, s.F);
    const Activation act = Activation::at(load(gate + i, n));
    const vfloat u = load(up + i, n), g = load(grad_y + i, n);
    grad_weight = fma(g, act.value * u, grad_weight);
    store(grad_gate + i, g * weight * u * act.slope, n);
    store(grad_up + i, g * weight * act.value, n);
  }
  if (s.grad_weights) s.grad_weights[t] = sum(grad_weight);
}

void for_tokens(const Gated& s, void (*row)(const Gated&, int64_t)) {
  for_rows(s.T, ROWS_OF_A_UNIT, s.threads, [&](int64_t t, int64_t) { row(s, t); });
}

template <class Activation>
void forward(const Gated& s) {
  for_tokens(s, s.is_bf16 ? forward_row<bfloat16, Activation> : forward_row<float, Activation>);
}

template <class Activation>
void backward(const Gated& s) {
  for_tokens(s, s.is_bf16 ? backward_row<bfloat16, Activation> : backward_row<float, Activation>);
}

}  // namespace

EXPORT(gated_forward)(const Gated* s) { s->gelu ? forward<Gelu>(*s) : forward<Silu>(*s); }

EXPORT(gated_backward)(const Gated* s) { s->gelu ? backward<Gelu>(*s) : backward<Silu>(*s); }
