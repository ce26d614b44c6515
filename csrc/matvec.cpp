// A few vectors times a matrix.
#include "matvec.h"

#include "parallel.h"
#include "simd.h"

EXPORT(matvec)(const Matvec* m) {
  const int64_t O = m->weight.rows;
  for (int64_t before = 0; before < m->B; before += MAX_VECTORS) {  // so many vectors stay in the second-level cache
    const int vectors = m->B - before < MAX_VECTORS ? (int)(m->B - before) : MAX_VECTORS;
    run_in_stretches(units_of(O), m->threads, [m, O, before, vectors](int64_t unit) {
      const int64_t first = unit * UNIT_ROWS;
      const float* x[MAX_VECTORS];
      float* y[MAX_VECTORS];
      for (int c = 0; c < vectors; c++)
        x[c] = m->x + (before + c) * m->weight.columns, y[c] = m->y + (before + c) * O + first;
      multiply(m->weight, first, end_of_unit(unit, O), x, y, vectors);
    });
  }
}
