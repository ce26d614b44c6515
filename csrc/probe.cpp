// How fast this machine computes 2^x: the limit of the scan, which needs one for each state of each channel and token.
#include "decay.h"
#include "simd.h"

struct Probe {
  int64_t exponentials;
  float result;
};

EXPORT(probe)(Probe* probe) {
  vfloat x[8], sums[8] = {};
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) x[i] = all(-0.1f * (float)(i + 1));
  for (int64_t done = 0; done < probe->exponentials; done += 8 * W) {
    vfloat scale = all((float)(done / W % 64));
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) sums[i] += decay(scale, x[i]);
  }
  vfloat total = {};
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) total += sums[i];
  probe->result = sum(total);
}
