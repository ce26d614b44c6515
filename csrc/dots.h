// Rows of a matrix times a few vectors, at the speed at which memory delivers the rows: each weight is read once.
#pragma once
#include "simd.h"

// As in megatron_blackmamba/ops/matvec/cpp.py.
struct Matrix {
  const void* data;  // fp32 or bf16, rows contiguous
  int64_t rows, columns, stride, is_bf16;
};

namespace {

constexpr int MAX_VECTORS = 64;             // at once; as in megatron_blackmamba/ops/matvec/cpp.py
constexpr int UNIT_ROWS = 64;              // rows of one unit of work
constexpr int MAX_ROWS = W == 16 ? 4 : 2;  // rows at once, as the registers allow
constexpr int AHEAD = 8192;                // bytes; the processor's own prefetching stops at every page

inline int64_t units_of(int64_t rows) { return (rows + UNIT_ROWS - 1) / UNIT_ROWS; }
inline int64_t end_of_unit(int64_t index, int64_t rows) {
  return (index + 1) * UNIT_ROWS < rows ? (index + 1) * UNIT_ROWS : rows;
}

// y[c][r] for ROWS rows and BATCH vectors. One vector: memory is read from front to back, which is fastest. More vectors:
// several rows at once, or reading the vectors again for every row would take longer than the row.
template <class T, int ROWS, int BATCH>
INLINE void dots(const T* weight, int64_t stride, int64_t columns, const float* const* x, float* const* y, int64_t row) {
  constexpr int UNROLL = ROWS * BATCH == 1 ? 4 : 1;  // independent sums, to hide the latency of fma
  vfloat sums[UNROLL][ROWS][BATCH] = {};
  auto step = [&](int64_t i, int u, int lanes) {
    vfloat w[ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) w[r] = load(weight + r * stride + i, lanes);
#pragma GCC unroll 4
    for (int c = 0; c < BATCH; c++) {
      vfloat v = load(x[c] + i, lanes);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++) sums[u][r][c] = fma(w[r], v, sums[u][r][c]);
    }
  };
  int64_t i = 0;
  for (; i + UNROLL * W <= columns; i += UNROLL * W) {
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
      for (int line = 0; line < (int)(UNROLL * W * sizeof(T)); line += 64)
        __builtin_prefetch((const char*)(weight + r * stride + i) + (ROWS == 1 ? AHEAD : ROWS * stride * sizeof(T)) + line);
#pragma GCC unroll 4
    for (int u = 0; u < UNROLL; u++) step(i + u * W, u, W);
  }
  for (; i + W <= columns; i += W) step(i, 0, W);
  if (i < columns) step(i, 0, (int)(columns - i));
#pragma GCC unroll 4
  for (int c = 0; c < BATCH; c++) {
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 4
      for (int u = 1; u < UNROLL; u++) sums[0][r][c] += sums[u][r][c];
      y[c][row + r] = sum(sums[0][r][c]);
    }
  }
}

template <class T, int ROWS>
INLINE void dots(const T* weight, const Matrix& m, const float* const* x, float* const* y, int64_t row, int vectors) {
  int c = 0;
  for (; c + 4 <= vectors; c += 4) dots<T, ROWS, 4>(weight, m.stride, m.columns, x + c, y + c, row);
  for (; c + 2 <= vectors; c += 2) dots<T, ROWS, 2>(weight, m.stride, m.columns, x + c, y + c, row);
  if (c < vectors) dots<T, ROWS, 1>(weight, m.stride, m.columns, x + c, y + c, row);
}

template <class T>
void multiply(const Matrix& m, int64_t first, int64_t end, const float* const* x, float* const* y, int vectors) {
  const T* weight = (const T*)m.data + first * m.stride;
  int64_t row = 0, rows = end - first;
  if (vectors > 1)
    for (; row + MAX_ROWS <= rows; row += MAX_ROWS)
      dots<T, MAX_ROWS>(weight + row * m.stride, m, x, y, row, vectors);
  for (; row < rows; row++) dots<T, 1>(weight + row * m.stride, m, x, y, row, vectors);
}

// y[c][row - first] = the dot product of x[c] with each row from `first` on.
void multiply(const Matrix& m, int64_t first, int64_t end, const float* const* x, float* const* y, int vectors) {
  m.is_bf16 ? multiply<bfloat16>(m, first, end, x, y, vectors) : multiply<float>(m, first, end, x, y, vectors);
}

}  // namespace
