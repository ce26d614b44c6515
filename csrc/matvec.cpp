// A few vectors times a matrix.
#include "matvec.h"

#include "parallel.h"
#include "simd.h"

EXPORT(matvec)(const Matvec* m) {
  const int64_t O = m->weight.rows;
  run_in_stretches(units_of(O), m->threads, [m, O](int64_t unit) {
    const int64_t first = unit * UNIT_ROWS;
    const float* x[MAX_VECTORS];
    float* y[MAX_VECTORS];
    for (int c = 0; c < m->B; c++) x[c] = m->x + c * m->weight.columns, y[c] = m->y + c * O + first;
    multiply(m->weight, first, end_of_unit(unit, O), x, y, (int)m->B);
  });
}
