// The causal depthwise convolution, forward and backward, in one pass over the activations each.
//
// The lanes of a vector are neighbouring channels; the last K inputs of a block of channels stay in registers while time
// advances through a chunk of tokens. The backward goes through the chunks from the last to the first: inside a chunk it
// first computes the gradients before the activation, forward in time, then spreads them over the inputs, backward.
#include "causal_conv1d.h"

#include "parallel.h"
#include "rows.h"
#include "simd.h"

namespace {

// The inputs that token t sees, oldest first: input[K - 1] is its own.
template <class T, int K>
struct Window {
  vfloat input[K] = {};

  // As it is before token `start`: the inputs before it that belong to the same document as token start - 1.
  Window(const CausalConv1d& s, const Unit& unit, const Rows<T>& x, int block, int64_t start) {
    for (int64_t t = start - (K - 1); t < start; t++) {
      if (t >= 0)
        push(s, unit, x.load((int)(t - start)), t);
      else if (s.initial_window)
        push(load((const T*)s.initial_window + unit.b * s.initial_window_strides[0] +
                      (t + K - 1) * s.initial_window_strides[1] + unit.first + block * W,
                  unit.lanes(block)));
    }
  }
  void push(vfloat next) {
#pragma GCC unroll 4
    for (int j = 0; j + 1 < K; j++) input[j] = input[j + 1];
    input[K - 1] = next;
  }
  void push(const CausalConv1d& s, const Unit& unit, vfloat next, int64_t t) {
    if (s.reset && s.reset[unit.b * s.L + t])
#pragma GCC unroll 4
      for (int j = 0; j < K; j++) input[j] = vfloat{};
    push(next);
  }
  vfloat dot(const vfloat* weight, vfloat bias) const {
    vfloat sum = bias;
#pragma GCC unroll 4
    for (int j = 0; j < K; j++) sum = fma(input[j], weight[j], sum);
    return sum;
  }
};

template <int K>
INLINE void load_weights(vfloat* weight, const CausalConv1d& s, int64_t channel) {
#pragma GCC unroll 4
  for (int j = 0; j < K; j++) weight[j] = load(s.weight + j * padded_channels(s.I) + channel);
}

INLINE int tokens_of(const CausalConv1d& s, int64_t q) {
  return (int)(s.L - q * CHUNK < CHUNK ? s.L - q * CHUNK : CHUNK);
}

template <class T, int K>
void forward_unit(const CausalConv1d& s, const Unit unit) {
  for (int64_t q = 0; q * CHUNK < s.L; q++)
    for (int k = 0; k < unit.blocks; k++) {
      Ahead ahead;
      const Rows<T> x(s.x, s.x_strides, unit, q, k, 1, ahead), y(s.y, s.y_strides, unit, q, k, 1, ahead);
      const int64_t channel = unit.first + k * W;
      vfloat weight[K], bias = load(s.bias + channel);
      load_weights<K>(weight, s, channel);
      Window<T, K> window(s, unit, x, k, q * CHUNK);
      for (int t = 0; t < tokens_of(s, q); t++) {
        ahead.prefetch(t, 0, 1);
        window.push(s, unit, x.load(t), q * CHUNK + t);
        vfloat v = window.dot(weight, bias);
        y.store(t, s.silu ? v * sigmoid(v) : v);
      }
    }
}

template <class T, int K>
void backward_unit(const CausalConv1d& s, const Unit unit) {
  const int64_t P = padded_channels(s.I);
  for (int64_t q = (s.L + CHUNK - 1) / CHUNK - 1; q >= 0; q--)
    for (int k = 0; k < unit.blocks; k++) {
      Ahead ahead;
      const Rows<T> x(s.x, s.x_strides, unit, q, k, -1, ahead);
      const Rows<T> grad_y(s.grad_y, s.grad_y_strides, unit, q, k, -1, ahead);
      const Rows<T> grad_x(s.grad_x, s.grad_x_strides, unit, q, k, -1, ahead);
      const int64_t channel = unit.first + k * W;
      const int tokens = tokens_of(s, q);
      vfloat weight[K], bias = load(s.bias + channel);
      load_weights<K>(weight, s, channel);

      float *grad_weight = s.grad_weight + unit.b * K * P + channel, *grad_bias = s.grad_bias + unit.b * P + channel;
      vfloat gw[K], gb = load(grad_bias), g[CHUNK];
#pragma GCC unroll 4
      for (int j = 0; j < K; j++) gw[j] = load(grad_weight + j * P);
      Window<T, K> window(s, unit, x, k, q * CHUNK);
      for (int t = 0; t < tokens; t++) {
        ahead.prefetch(t, 0, 1);
        window.push(s, unit, x.load(t), q * CHUNK + t);
        g[t] = grad_y.load(t);
        if (s.silu) {
          vfloat v = window.dot(weight, bias), gate = sigmoid(v);
          g[t] *= gate * fma(v, 1.0f - gate, all(1.0f));
        }
        gb += g[t];
#pragma GCC unroll 4
        for (int j = 0; j < K; j++) gw[j] = fma(g[t], window.input[j], gw[j]);
      }
      store(grad_bias, gb);
#pragma GCC unroll 4
      for (int j = 0; j < K; j++) store(grad_weight + j * P, gw[j]);

      // later[j] is the gradient at j tokens after t, zero where that token is of another document.
      float* kept = s.workspace + unit.b * (K - 1) * P + channel;
      vfloat later[K];
#pragma GCC unroll 4
      for (int j = 0; j + 1 < K; j++) later[j] = load(kept + j * P);
      auto step_back = [&](vfloat now) {
#pragma GCC unroll 4
        for (int j = K - 1; j > 0; j--) later[j] = later[j - 1];
        later[0] = now;
        vfloat sum = {};
#pragma GCC unroll 4
        for (int j = 0; j < K; j++) sum = fma(later[j], weight[K - 1 - j], sum);
        return sum;
      };
      for (int t = tokens - 1; t >= 0; t--) {
        grad_x.store(t, step_back(g[t]));
        if (s.reset && s.reset[unit.b * s.L + q * CHUNK + t])
#pragma GCC unroll 4
          for (int j = 0; j < K; j++) later[j] = vfloat{};
      }
#pragma GCC unroll 4
      for (int j = 0; j + 1 < K; j++) store(kept + j * P, later[j]);
      if (q == 0 && s.grad_initial_window)
        for (int t = K - 2; t >= 0; t--)
          store((T*)s.grad_initial_window + unit.b * s.grad_initial_window_strides[0] +
                    t * s.grad_initial_window_strides[1] + channel,
                step_back(vfloat{}), unit.lanes(k));
    }
}

template <int K>
void forward(const CausalConv1d& s) {
  auto work = [&s](int64_t i) { s.is_bf16 ? forward_unit<bfloat16, K>(s, {s, i}) : forward_unit<float, K>(s, {s, i}); };
  run_in_parallel(Unit::count(s), (int)s.threads, work);
}

template <int K>
void backward(const CausalConv1d& s) {
  auto work = [&s](int64_t i) { s.is_bf16 ? backward_unit<bfloat16, K>(s, {s, i}) : backward_unit<float, K>(s, {s, i}); };
  run_in_parallel(Unit::count(s), (int)s.threads, work);
}

}  // namespace

EXPORT(causal_conv1d_forward)(const CausalConv1d* s) {
  s->K == 2 ? forward<2>(*s) : s->K == 3 ? forward<3>(*s) : forward<4>(*s);
}

EXPORT(causal_conv1d_backward)(const CausalConv1d* s) {
  s->K == 2 ? backward<2>(*s) : s->K == 3 ? backward<3>(*s) : backward<4>(*s);
}
