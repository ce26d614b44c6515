// 2^(a b), the decay of a state: half of what the scan computes.
#pragma once
#include "simd.h"

namespace {

#if defined(__AVX512F__)
// 2^(a b) is 2^n times 2^r, n a multiple of 1/32 and so r at most 1/64: 1 + r (c1 + r c2) has a relative error of at most
// 2.2e-7, and it vanishes with r, so a decay close to 1 that is applied thousands of times does not drift. Two registers
// hold the powers of 2^(1/32) for the last five bits of n, scalef takes the others. For a b below 2^80 in size.
alignas(64) constexpr float ROOTS[32] = {
    1.0f, 1.02189715f, 1.04427378f, 1.0671404f, 1.09050773f, 1.11438674f, 1.13878863f, 1.16372486f,
    1.18920712f, 1.21524736f, 1.24185781f, 1.26905096f, 1.29683955f, 1.32523664f, 1.35425555f, 1.38390988f,
    1.41421356f, 1.44518081f, 1.47682615f, 1.50916443f, 1.54221083f, 1.57598085f, 1.61049033f, 1.64575548f,
    1.68179283f, 1.7186193f, 1.75625216f, 1.79470908f, 1.83400809f, 1.87416763f, 1.91520656f, 1.95714412f,
};

INLINE vfloat decay(vfloat a, vfloat b) {
  const vfloat to_32nds = all(393216.0f);  // 1.5 * 2^18: added to a number, it rounds it to a multiple of 1/32
  const vfloat shifted = fma(a, b, to_32nds), n = shifted - to_32nds, r = fma(a, b, -n);
  const vfloat fraction = fma(fma(all(2.402265070e-1f), r, all(6.931471806e-1f)), r, all(1.0f));
  const __m512 root = _mm512_permutex2var_ps(_mm512_load_ps(ROOTS), (__m512i)shifted, _mm512_load_ps(ROOTS + 16));
  return (vfloat)_mm512_scalef_ps((__m512)fraction * root, (__m512)n);
}
#else
INLINE vfloat decay(vfloat a, vfloat b) { return exp2(a * b); }
#endif

}  // namespace
