// The arguments of Sinkhorn routing, mirrored field by field in megatron_blackmamba/ops/sinkhorn/cpp.py.
#pragma once
#include <cstdint>

// Shapes: T tokens, E experts (at most MAX_EXPERTS), P the tokens padded to a multiple of 16. All is contiguous.
struct Sinkhorn {
  int64_t T, E;
  int64_t sum_columns;     // whether loading leaves each expert's sum over the tokens as well,
  int64_t normalise_rows;  // and that of rows which are normalised first
  int64_t iterations;      // how many follow each other before somebody else's sums are added
  float scale;             // X = scale * logits: temperature / ln 2
  float bound;             // no update while every expert has at most this multiple of the mean; 0: always update
  const float* logits;     // [T, E]
  float* X;                // [P * E]: in vectors of W tokens, those of all experts side by side
  float *offset, *largest, *sum;  // [E]
  int64_t* choice;         // [T]
  int64_t* tokens;         // [E], added to, or null
};
