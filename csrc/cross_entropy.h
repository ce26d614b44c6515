// The arguments of the cross entropy, mirrored field by field in megatron_blackmamba/ops/cross_entropy/cpp.py.
#pragma once
#include <cstdint>

// Shapes: T tokens, V vocabulary. Everything is contiguous; logits and their gradient are fp32 or bf16, the rest fp32.
struct CrossEntropy {
  int64_t T, V;
  int64_t is_bf16, threads;
  const void* logits;     // [T, V]
  const int64_t* labels;  // [T], each from 0 to V - 1
  float *loss, *log_sum;  // [T], the second the logarithm of the sum of exponentials

  // For the backward only.
  const float* grad_loss;  // [T]
  void* grad_logits;       // [T, V]; may be the logits themselves
};
