// Sinkhorn routing: the expert of each token, so that all experts get about the same number of tokens.
//
// X = scale * logits are logarithms of base 2, and all that has to be found is an offset for each expert. An iteration
// takes from it the logarithm of the expert's sum over the tokens, whose own sums are 1 by then. The sum of a pass is left
// as 2^largest * sum, for whoever has more tokens elsewhere to add theirs, and taken off when the next pass begins.
//
// Only the first sums, those of the logits as they come, can be too large or too small for fp32. After them each expert
// has a token that makes up 1 / T of its sum or more, and an iteration changes the ratio of two experts by at most T * E.
//
// One thread does it all: 16,384 tokens take it a tenth of a millisecond, and waking another takes as long.
#include "sinkhorn.h"

#include "simd.h"

namespace {

constexpr int MAX_EXPERTS = 1024;
constexpr int CHUNK = 512;        // tokens summed before they are added to the others: 8 experts' stay in the L1 cache
constexpr float LOWEST = -1e38f;  // X of tokens that are not there
constexpr float SMALLEST = -100;  // an exponent as good as none, without the slow denormal numbers below

INLINE vfloat share(vfloat x, vfloat largest) { return exp2(max(x - largest, all(SMALLEST))); }

struct Router {
  const Sinkhorn& s;

  // Calls work(X of W tokens, the first of them, how many are there) from token `first` on.
  template <class F>
  void for_tiles(int64_t first, F work) const {
    const int64_t end = first + CHUNK < s.T ? first + CHUNK : s.T;
    for (int64_t t = first; t < end; t += W) work(s.X + t * s.E, t, end - t < W ? (int)(end - t) : W);
  }

  void load_chunk(int64_t first) const {
    vfloat largest[MAX_EXPERTS], sums[MAX_EXPERTS];
    for (int64_t e = 0; e < s.E; e++) largest[e] = all(LOWEST), sums[e] = vfloat{};
    for_tiles(first, [&](float* X, int64_t t, int lanes) {
      for (int64_t e = 0; e < s.E; e++) store(X + e * W, column(s.logits + t * s.E + e, lanes));
      if (s.normalise_rows) normalise(X, lanes);
      for (int64_t e = 0; e < s.E; e++) largest[e] = max(largest[e], load(X + e * W));
    });
    if (!s.sum_columns) return;
    for_tiles(first, [&](float* X, int64_t, int) {
      for (int64_t e = 0; e < s.E; e++) sums[e] += share(load(X + e * W), largest[e]);
    });
    for (int64_t e = 0; e < s.E; e++) {
      float most = s.largest[e];
      for (int i = 0; i < W; i++) most = largest[e][i] > most ? largest[e][i] : most;
      s.sum[e] = s.sum[e] * share(all(s.largest[e]), all(most))[0] + sum(sums[e] * share(largest[e], all(most)));
      s.largest[e] = most;
    }
  }

  vfloat column(const float* logits, int lanes) const {
    float x[W];
    if (lanes == W)
      for (int i = 0; i < W; i++) x[i] = logits[i * s.E] * s.scale;
    else
      for (int i = 0; i < W; i++) x[i] = i < lanes ? logits[i * s.E] * s.scale : LOWEST;
    return load(x);
  }

  void normalise(float* X, int lanes) const {
    vfloat largest = all(LOWEST), row = {};
    for (int64_t e = 0; e < s.E; e++) largest = max(largest, load(X + e * W));
    for (int64_t e = 0; e < s.E; e++) row += share(load(X + e * W), largest);
    for (int i = 0; i < lanes; i++) largest[i] += __builtin_log2f(row[i]);
    for (int64_t e = 0; e < s.E; e++) store(X + e * W, load(X + e * W) - largest, lanes);
  }

  void iterate_chunk(int64_t first) const {
    vfloat shares[MAX_EXPERTS], sums[MAX_EXPERTS];
    for (int64_t e = 0; e < s.E; e++) sums[e] = vfloat{};
    for_tiles(first, [&](float* X, int64_t, int lanes) {
      vfloat largest = all(LOWEST), row = {};
      for (int64_t e = 0; e < s.E; e++) largest = max(largest, load(X + e * W) + s.offset[e]);
      for (int64_t e = 0; e < s.E; e++) row += shares[e] = share(load(X + e * W) + s.offset[e], largest);
      vfloat inverse = reciprocal(row);
      for (int i = lanes; i < W; i++) inverse[i] = 0;
      for (int64_t e = 0; e < s.E; e++) sums[e] = fma(shares[e], inverse, sums[e]);
    });
    for (int64_t e = 0; e < s.E; e++) s.sum[e] += sum(sums[e]);
  }

  void choose_chunk(int64_t first) const {
    vint counts[MAX_EXPERTS];
    for (int64_t e = 0; e < s.E; e++) counts[e] = vint{};
    for_tiles(first, [&](float* X, int64_t t, int lanes) {
      vfloat highest = load(X) + s.offset[0];
      vint best = {};
      for (int e = 1; e < s.E; e++) {
        const vfloat x = load(X + e * W) + s.offset[e];
        best = x > highest ? vint{} + e : best;
        highest = max(x, highest);
      }
      for (int i = 0; i < lanes; i++) s.choice[t + i] = best[i];
      for (int i = lanes; i < W; i++) best[i] = -1;
      for (int e = 0; e < s.E; e++) counts[e] -= best == e;
    });
    if (!s.tokens) return;
    for (int64_t e = 0; e < s.E; e++)
      for (int i = 0; i < W; i++) s.tokens[e] += counts[e][i];
  }

  void begin_sums(float largest) const {
    for (int64_t e = 0; e < s.E; e++) s.largest[e] = largest, s.sum[e] = 0;
  }

  // Whether the plan that gave the sums is balanced enough.
  bool settled() const {
    float most = 0, total = 0;
    for (int64_t e = 0; e < s.E; e++) {
      most = s.sum[e] > most ? s.sum[e] : most;
      total += s.sum[e];
    }
    return s.bound > 0 && most * s.E <= s.bound * total;
  }

  // Only the experts' ratios matter, so the largest offset shall be 0: left alone they would sink without end.
  void update_offsets() const {
    float most = LOWEST;
    for (int64_t e = 0; e < s.E; e++) {
      s.offset[e] -= s.largest[e] + __builtin_log2f(s.sum[e]);
      most = s.offset[e] > most ? s.offset[e] : most;
    }
    for (int64_t e = 0; e < s.E; e++) s.offset[e] -= most;
  }
};

}  // namespace

EXPORT(sinkhorn_load)(const Sinkhorn* s) {
  const Router router{*s};
  router.begin_sums(LOWEST);
  for (int64_t t = 0; t < s->T; t += CHUNK) router.load_chunk(t);
}

EXPORT(sinkhorn_iterate)(const Sinkhorn* s) {
  const Router router{*s};
  for (int64_t i = 0; i < s->iterations; i++) {
    if (router.settled()) {  // once settled, it stays so, also if somebody adds equal sums
      for (int64_t e = 0; e < s->E; e++) s->sum[e] = 1;
      return;
    }
    router.update_offsets();
    router.begin_sums(0);
    for (int64_t t = 0; t < s->T; t += CHUNK) router.iterate_chunk(t);
  }
}

EXPORT(sinkhorn_choose)(const Sinkhorn* s) {
  const Router router{*s};
  if (s->sum_columns && !router.settled()) router.update_offsets();
  for (int64_t t = 0; t < s->T; t += CHUNK) router.choose_chunk(t);
}
