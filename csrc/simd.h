// One vector of floats as wide as the instruction set this file is compiled for, and the few functions the kernels need.
//
// Each kernel source is compiled once per instruction set, with BLACKMAMBA_ISA naming it; EXPORT() makes that name part
// of the exported symbol, and everything else lives in an unnamed namespace, so that no two versions can be mixed up at
// link time. For the same reason the kernels use no standard templates: an inline function of libstdc++ compiled with
// AVX-512 could end up being the one that a plain machine runs.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define EXPORT(name) extern "C" __attribute__((visibility("default"))) void JOIN(name, BLACKMAMBA_ISA)
#define INLINE static inline __attribute__((always_inline))

namespace {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vfloat __attribute__((vector_size(4 * W), aligned(4 * W)));
typedef int32_t vint __attribute__((vector_size(4 * W)));
typedef uint32_t vuint __attribute__((vector_size(4 * W)));
typedef uint16_t vhalf __attribute__((vector_size(2 * W)));

struct bfloat16 {
  uint16_t bits;
};

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

INLINE vfloat all(float x) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_set1_ps(x);
#elif defined(__AVX2__)
  return (vfloat)_mm256_set1_ps(x);
#else
  return vfloat{x, x, x, x};
#endif
}

INLINE vfloat load(const float* p) {
  vfloat v;
  memcpy(&v, p, sizeof v);
  return v;
}

INLINE void store(float* p, vfloat v) { memcpy(p, &v, sizeof v); }

// How many of the W numbers from i on lie before the end.
INLINE int lanes_at(int64_t i, int64_t end) { return end - i < W ? (int)(end - i) : W; }

// Loads and stores of the first n lanes: the last block of channels may be narrower than a vector.
INLINE vfloat load(const float* p, int n) {
  if (n == W) return load(p);
#if defined(__AVX512F__)
  return (vfloat)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
#else
  vfloat v = {};
  memcpy(&v, p, 4 * n);
  return v;
#endif
}

INLINE vfloat load(const bfloat16* p, int n) {
  vhalf half = {};
  if (n == W)
    memcpy(&half, p, sizeof half);
  else
#if defined(__AVX512F__)
    half = (vhalf)_mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), p);
#else
    memcpy(&half, p, 2 * n);
#endif
#if defined(__AVX512F__)
  return (vfloat)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)half), 16);
#elif defined(__AVX2__)
  return (vfloat)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)half), 16);
#else
  return (vfloat)(__builtin_convertvector(half, vuint) << 16);
#endif
}

INLINE void store(float* p, vfloat v, int n) {
  if (n == W)
    store(p, v);
  else
#if defined(__AVX512F__)
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)v);
#else
    memcpy(p, &v, 4 * n);
#endif
}

INLINE void store(bfloat16* p, vfloat v, int n) {
  vuint bits = (vuint)v;
  bits += 0x7fff + ((bits >> 16) & 1);  // round to nearest even
  bits = v == v ? bits : vuint{} + 0x7fc00000;
#if defined(__AVX512F__)
  vhalf half = (vhalf)_mm512_cvtepi32_epi16((__m512i)(bits >> 16));
#else
  vhalf half = __builtin_convertvector(bits >> 16, vhalf);
#endif
  memcpy(p, &half, n == W ? sizeof half : 2 * n);
}

INLINE vfloat fma(vfloat a, vfloat b, vfloat c) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (vfloat)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

INLINE vfloat min(vfloat a, vfloat b) { return a < b ? a : b; }
INLINE vfloat max(vfloat a, vfloat b) { return a > b ? a : b; }

// 2^r on [-0.5, 0.5] as 1 + r q(r): the relative error, at most 2.1e-7, vanishes with r, so a decay close to 1 that is
// applied thousands of times does not drift.
INLINE vfloat exp2_fraction(vfloat r) {
  vfloat q = fma(all(1.340043644e-3f), r, all(9.666372954e-3f));
  q = fma(q, r, all(5.550333181e-2f));
  q = fma(q, r, all(2.402234895e-1f));
  q = fma(q, r, all(6.931471955e-1f));
  return fma(q, r, all(1.0f));
}

INLINE vfloat exp2(vfloat x) {
#if defined(__AVX512F__)
  vfloat r = (vfloat)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return (vfloat)_mm512_scalef_ps((__m512)exp2_fraction(r), (__m512)(x - r));
#else
  x = min(max(x, all(-126.0f)), all(126.0f));
  vfloat shifted = x + 12582912.0f;  // 1.5 * 2^23: the integer nearest to x lands in the low bits
  vfloat fraction = exp2_fraction(x - (shifted - 12582912.0f));
  return (vfloat)((vint)fraction + ((vint)shifted << 23));
#endif
}

INLINE vfloat reciprocal(vfloat x) {
#if defined(__AVX512F__)
  vfloat r = (vfloat)_mm512_rcp14_ps((__m512)x);
  return r * (all(2.0f) - x * r);
#else
  return 1.0f / x;
#endif
}

INLINE vfloat sigmoid(vfloat x) { return reciprocal(exp2(min(x * -LOG2_E, all(126.0f))) + 1.0f); }

// max(x, 0) + log1p(w), w = exp(-|x|), with log1p(w) = 2 atanh(s), s = w / (2 + w) <= 1/3, and
// 2 atanh(s) / s a polynomial in s^2 with an error of 1.1e-8. NaN stays NaN. The slope, sigmoid(x), takes the same w.
INLINE vfloat softplus(vfloat x, vfloat& slope) {
  vfloat w = exp2((x < 0.0f ? x : -x) * LOG2_E);
  vfloat s = w * reciprocal(w + 2.0f);
  vfloat s2 = s * s;
  vfloat p = fma(all(2.819154675e-01f), s2, all(2.795766590e-01f));
  p = fma(p, s2, all(4.002511432e-01f));
  p = fma(p, s2, all(6.666631015e-01f));
  p = fma(p, s2, all(2.000000008e+00f));
  slope = reciprocal(w + 1.0f) * (x < 0.0f ? w : all(1.0f));
  return fma(p, s, x < 0.0f ? vfloat{} : x);
}

INLINE vfloat softplus(vfloat x) {
  vfloat slope;
  return softplus(x, slope);
}

// The normal distribution Phi as a polynomial times exp(-x^2 / 2) (Abramowitz and Stegun 7.1.26), with an absolute error
// of at most 7.5e-8.
INLINE vfloat normal_distribution(vfloat x) {
  vfloat size = max(x, -x) * 0.70710678f;
  vfloat t = reciprocal(fma(all(0.3275911f), size, all(1.0f)));
  vfloat p = fma(all(1.061405429f), t, all(-1.453152027f));
  p = fma(p, t, all(1.421413741f));
  p = fma(p, t, all(-0.284496736f));
  p = fma(p, t, all(0.254829592f));
  vfloat tail = p * t * exp2(max(size * size * -LOG2_E, all(-126.0f))) * 0.5f;
  return x < 0.0f ? tail : 1.0f - tail;
}

INLINE vfloat gelu(vfloat x) { return x * normal_distribution(x); }

INLINE float sum(vfloat v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float s = 0;
  for (int i = 0; i < W; i++) s += v[i];
  return s;
#endif
}

// Writes the sum of the lanes of each of `count` vectors; count is a multiple of 4.
INLINE void sums(float* out, const float* vectors, int64_t count) {
#if defined(__AVX2__)
  for (int64_t i = 0; i < count; i += 4, out += 4, vectors += 4 * W) {
#if defined(__AVX512F__)
    __m512 a = _mm512_load_ps(vectors), b = _mm512_load_ps(vectors + W);
    __m512 c = _mm512_load_ps(vectors + 2 * W), d = _mm512_load_ps(vectors + 3 * W);
    __m512d ab = _mm512_castps_pd(_mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b));
    __m512d cd = _mm512_castps_pd(_mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d));
    __m512 abcd = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)) + _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd));
    __m256 half = _mm512_castps512_ps256(abcd) + _mm512_extractf32x8_ps(abcd, 1);
#else
    __m256 ab = _mm256_hadd_ps(_mm256_load_ps(vectors), _mm256_load_ps(vectors + W));
    __m256 cd = _mm256_hadd_ps(_mm256_load_ps(vectors + 2 * W), _mm256_load_ps(vectors + 3 * W));
    __m256 half = _mm256_hadd_ps(ab, cd);
#endif
    _mm_storeu_ps(out, _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1));
  }
#else
  for (int64_t i = 0; i < count; i++) out[i] = sum(load(vectors + i * W));
#endif
}

}  // namespace
