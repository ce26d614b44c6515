// Run a CUDA kernel's source on a CPU, one block at a time. Each thread is a coroutine that runs until it meets others.
//
// A thread runs alone until it waits for its warp, and a warp until it waits for its block. So a missing barrier shows: a
// thread reads what others have not written yet, or overwrites what they have not read. `order` decides who runs first,
// `copies_are_early` whether asynchronous copies happen as soon or as late as they may. Shared memory begins as NaN.
// What it cannot show: shuffles and matrix products order memory here, which a GPU does not promise.
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float4 { float x, y, z, w; };
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct Index { int x = 0, y = 0, z = 0; };

struct Copy { void* to; const void* from; bool present; };
struct Thread {
  ucontext_t context;
  std::vector<char> stack;
  Index index;
  int waits = 0, arrived = 0;  // 0 runs, 1 waits for its warp, 2 for its block, 3 is done
  std::vector<std::vector<Copy>> copies;
  float offered[2][6];
};
static std::vector<Thread> threads;
static Thread* current;
static ucontext_t scheduler;
static Index blockIdx, gridDim;
static char* shared_memory;
static bool copies_are_early;
static int order;
static std::function<void()> body;
#define threadIdx (current->index)

static void wait_for(int whom) { current->waits = whom; ++current->arrived; swapcontext(&current->context, &scheduler); }
static void __syncthreads() { wait_for(2); }
static void __syncwarp() { wait_for(1); }
static void enter() { body(); current->waits = 3; swapcontext(&current->context, &scheduler); }
static void perform(const Copy& c) { c.present ? memcpy(c.to, c.from, 16) : memset(c.to, 0, 16); }

#define DEVICE static inline
#define DEVICE_MEMBER
#define KERNEL extern "C"
#define __launch_bounds__(...)
#define UNROLL
#define SHARED_MEMORY(name) char* name = shared_memory
typedef unsigned short bf16;
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

DEVICE float bits_to_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
DEVICE unsigned float_to_bits(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
DEVICE float power_of_2(float x) { return exp2f(x); }
DEVICE float log_2(float x) { return log2f(x); }
DEVICE float reciprocal(float x) { return 1.0f / x; }
DEVICE unsigned short round_to_bf16(float x) { unsigned w = float_to_bits(x); return (w + 0x7fff + (w >> 16 & 1)) >> 16; }
DEVICE unsigned pack(float low, float high) { return round_to_bf16(low) | (unsigned)round_to_bf16(high) << 16; }

// Values meet in one of two buffers: nobody offers again in the same one before all have read.
DEVICE float* offer() { return current->offered[current->arrived & 1]; }
DEVICE float shuffle_xor(float x, int mask) {
  const int which = current->arrived & 1, other = (current->index.x & ~31) | ((current->index.x & 31) ^ mask);
  offer()[0] = x;
  __syncwarp();
  return threads[other].offered[which][0];
}
DEVICE float cut(float x) { return bits_to_float(float_to_bits(x) & 0xffffe000u); }
DEVICE void matrix_product(float* d, const float* a, float b0, float b1) {
  const int which = current->arrived & 1, warp = current->index.x & ~31, lane = current->index.x & 31;
  memcpy(offer(), a, 16);
  offer()[4] = b0;
  offer()[5] = b1;
  __syncwarp();
  for (int e = 0; e < 4; ++e) {
    const int row = lane / 4 + (e >> 1) * 8, column = 2 * (lane % 4) + (e & 1);
    d[e] = 0.0f;
    for (int k = 0; k < 8; ++k) {
      const float* of_a = threads[warp + row % 8 * 4 + k % 4].offered[which];
      const float* of_b = threads[warp + column * 4 + k % 4].offered[which];
      d[e] += cut(of_a[(row >= 8) + 2 * (k >= 4)]) * cut(of_b[4 + (k >= 4)]);
    }
  }
}

DEVICE void copy_later(void* shared, const void* global, bool present = true) {
  if ((uintptr_t)shared % 16 || (present && (uintptr_t)global % 16)) abort();
  if (copies_are_early) perform({shared, global, present});
  else current->copies.back().push_back({shared, global, present});
}
DEVICE void end_of_copies() { current->copies.emplace_back(); }
template <int LATEST> DEVICE void wait_for_all_copies_but() {  // the last entry of the list is not ended yet
  auto& groups = current->copies;
  for (size_t i = 0; i + 1 + LATEST < groups.size(); ++i) { for (auto& c : groups[i]) perform(c); groups[i].clear(); }
  while (groups.size() > 1 + LATEST) groups.erase(groups.begin());
}

// Let threads from .. from + size - 1 go on if all of them wait for `whom`; false if not.
static bool release(int from, int size, int whom) {
  for (int i = from; i < from + size; ++i) if (threads[i].waits != whom) return false;
  for (int i = from; i < from + size; ++i) threads[i].waits = 0;
  return true;
}

// Run the threads of a warp, alone, until they wait for the other warps.
static void run_warp(int from) {
  do {
    for (int i = 0; i < 32; ++i) {
      Thread& t = threads[from + (order == 0 ? i : order == 1 ? 31 - i : (i * 5 + 11) % 32)];
      if (t.waits) continue;
      current = &t;
      swapcontext(&scheduler, &t.context);
    }
  } while (release(from, 32, 1));
}

// Returns 0, or 1 if threads wait for each other for ever.
static int run_block(int count, int bytes) {
  std::vector<uint32_t> memory(bytes / 4 + 32, 0x7fffffffu);
  shared_memory = (char*)(((uintptr_t)memory.data() + 127) & ~(uintptr_t)127);
  threads.resize(count);
  for (int i = 0; i < count; ++i) {
    Thread& t = threads[i];
    t.stack.resize(1 << 16);
    t.index.x = i;
    t.waits = t.arrived = 0;
    t.copies.assign(1, {});
    getcontext(&t.context);
    t.context.uc_stack.ss_sp = t.stack.data();
    t.context.uc_stack.ss_size = t.stack.size();
    t.context.uc_link = &scheduler;
    makecontext(&t.context, enter, 0);
  }
  do {
    for (int i = 0; i < count; i += 32) run_warp(order == 1 ? count - 32 - i : i);
    bool done = true;
    for (Thread& t : threads) done = done && t.waits == 3;
    if (done) return 0;
  } while (release(0, count, 2));
  return 1;
}

template <class Arguments>
static int run(void (*kernel)(Arguments), const void* arguments, const int* grid, int count, int bytes) {
  Arguments given;
  memcpy((void*)&given, arguments, sizeof given);
  body = [kernel, given] { kernel(given); };
  gridDim = {grid[0], grid[1], grid[2]};
  for (blockIdx.z = 0; blockIdx.z < grid[2]; ++blockIdx.z)
    for (blockIdx.y = 0; blockIdx.y < grid[1]; ++blockIdx.y)
      for (blockIdx.x = 0; blockIdx.x < grid[0]; ++blockIdx.x)
        if (run_block(count, bytes)) return 1;
  return 0;
}
