// A few vectors times a matrix, at the speed at which memory delivers the matrix: each weight is read once.
#include "matvec.h"

#include "parallel.h"
#include "simd.h"

namespace {

constexpr int UNIT_ROWS = 64;                // rows of one unit of work
constexpr int MAX_ROWS = W == 16 ? 4 : 2;    // as the registers allow

// ROWS rows with BATCH vectors. One vector: memory is read from front to back, which is fastest. More vectors: several
// rows at once, or reading the vectors again for every row would take longer than the row.
template <class T, int ROWS, int BATCH>
INLINE void multiply(const Matvec& m, int64_t row, int64_t b) {
  constexpr int UNROLL = ROWS * BATCH == 1 ? 4 : 1;  // independent sums, to hide the latency of fma
  const T* weight = (const T*)m.weight + row * m.weight_stride;
  const float* x = m.x + b * m.I;
  vfloat sums[UNROLL][ROWS][BATCH] = {};
  auto step = [&](int64_t i, int u, int lanes) {
    vfloat w[ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) {
      w[r] = load(weight + r * m.weight_stride + i, lanes);
    }
#pragma GCC unroll 4
    for (int c = 0; c < BATCH; c++) {
      vfloat v = load(x + c * m.I + i, lanes);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++) sums[u][r][c] = fma(w[r], v, sums[u][r][c]);
    }
  };
  int64_t i = 0;
  for (; i + UNROLL * W <= m.I; i += UNROLL * W) {
#pragma GCC unroll 4
    for (int u = 0; u < UNROLL; u++) step(i + u * W, u, W);
  }
  for (; i + W <= m.I; i += W) step(i, 0, W);
  if (i < m.I) step(i, 0, (int)(m.I - i));
#pragma GCC unroll 4
  for (int c = 0; c < BATCH; c++) {
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 4
      for (int u = 1; u < UNROLL; u++) sums[0][r][c] += sums[u][r][c];
      m.y[(b + c) * m.O + row + r] = sum(sums[0][r][c]);
    }
  }
}

template <class T, int ROWS>
INLINE void multiply_rows(const Matvec& m, int64_t row) {
  int64_t b = 0;
  for (; b + 4 <= m.B; b += 4) multiply<T, ROWS, 4>(m, row, b);
  for (; b + 2 <= m.B; b += 2) multiply<T, ROWS, 2>(m, row, b);
  if (b < m.B) multiply<T, ROWS, 1>(m, row, b);
}

template <class T>
void unit(const Matvec& m, int64_t index) {
  int64_t row = index * UNIT_ROWS, end = row + UNIT_ROWS < m.O ? row + UNIT_ROWS : m.O;
  if (m.B > 1)
    for (; row + MAX_ROWS <= end; row += MAX_ROWS) multiply_rows<T, MAX_ROWS>(m, row);
  for (; row < end; row++) multiply_rows<T, 1>(m, row);
}

}  // namespace

EXPORT(matvec)(const Matvec* m) {
  auto work = [m](int64_t i) { m->is_bf16 ? unit<bfloat16>(*m, i) : unit<float>(*m, i); };
  run_in_parallel((m->O + UNIT_ROWS - 1) / UNIT_ROWS, (int)m->threads, work);
}
