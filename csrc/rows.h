// How the kernels on activations [B, L, I] go through memory: units of work, chunks of tokens, blocks of channels.
#pragma once
#include "simd.h"

namespace {

constexpr int CHUNK = 16;            // tokens that a block of channels goes through at once
constexpr int GROUP_CHANNELS = 128;  // units of work begin and end at multiples of this

inline int64_t padded_channels(int64_t I) { return (I + 15) / 16 * 16; }  // whole vectors for every instruction set

// Rows that the next block of channels will read or write. Asked for all at once they would stall; the loops over states
// each ask for their part.
struct Ahead {
  const char* start[8];
  int64_t stride[8];
  int count = 0;
  void prefetch(int token, int part, int parts) const {
    for (int i = part; i < count; i += parts)
      __builtin_prefetch(start[i] + token * stride[i], 0, 2);  // into L2: rows often fall on few of L1's sets
  }
};

// A unit of work: one sequence, and a run of groups of channels. Within a chunk a unit goes over all its channels, row
// after row of memory; many short runs would pay for every page again and again.
struct Unit {
  int64_t b, first, channels;
  int blocks;
  template <class Arguments>
  Unit(const Arguments& s, int64_t index) {
    const int64_t runs = runs_per_sequence(s), groups = (s.I + GROUP_CHANNELS - 1) / GROUP_CHANNELS;
    b = index / runs;
    first = groups * (index % runs) / runs * GROUP_CHANNELS;
    const int64_t end = groups * (index % runs + 1) / runs * GROUP_CHANNELS;
    channels = (end < s.I ? end : s.I) - first;
    blocks = (int)((channels + W - 1) / W);
  }
  template <class Arguments>
  static int64_t runs_per_sequence(const Arguments& s) {
    const int64_t groups = (s.I + GROUP_CHANNELS - 1) / GROUP_CHANNELS;
    int64_t runs = 1;
    while (runs < groups && s.B * runs % s.threads) runs++;
    return runs;
  }
  template <class Arguments>
  static int64_t count(const Arguments& s) { return s.B * runs_per_sequence(s); }
  int lanes(int block) const { return (int)(channels - block * W < W ? channels - block * W : W); }
};

// One tensor [B, L, I] at a chunk and a block of channels. What comes next is the next block's channels, or after the
// last block the next chunk's (for the backward, the one before).
template <class T>
struct Rows {
  T* start;
  int64_t stride;
  int lanes;
  Rows(const void* data, const int64_t* strides, const Unit& unit, int64_t q, int block, int next_chunk, Ahead& ahead)
      : start((T*)data + unit.b * strides[0] + q * CHUNK * strides[1] + unit.first + block * W),
        stride(strides[1]),
        lanes(unit.lanes(block)) {
    if (!data) return;
    ahead.start[ahead.count] = (const char*)(start + (block + 1 < unit.blocks ? W : next_chunk * CHUNK * stride - block * W));
    ahead.stride[ahead.count++] = stride * sizeof(T);
  }
  vfloat load(int token) const { return ::load(start + token * stride, lanes); }
  void store(int token, vfloat v) const { ::store(start + token * stride, v, lanes); }
};

}  // namespace
