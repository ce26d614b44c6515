// The instructions of a GPU that the kernels use, each under a name. tests/ops/emulator.h defines the same for a CPU.
typedef unsigned short bf16;  // the upper half of a float
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

#define DEVICE static __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__
#define KERNEL extern "C" __global__
#define UNROLL _Pragma("unroll")
#define SHARED_MEMORY(name) extern __shared__ __align__(128) char name[]

DEVICE float power_of_2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
// Volatile, or the compiler would branch around it.
DEVICE float log_2(float x) { float y; asm volatile("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float reciprocal(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float bits_to_float(unsigned x) { return __uint_as_float(x); }
DEVICE unsigned float_to_bits(float x) { return __float_as_uint(x); }
DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }

// Two floats rounded to bf16, the first one in the lower half.
DEVICE unsigned pack(float low, float high) {
  unsigned both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

// Copy 16 bytes to shared memory, or zeros unless `present`; both addresses are multiples of 16.
DEVICE void copy_later(void* shared, const void* global, bool present = true) {
  const unsigned to = (unsigned)__cvta_generic_to_shared(shared), bytes = present ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes) : "memory");
}
DEVICE void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LATEST> DEVICE void wait_for_all_copies_but() { asm volatile("cp.async.wait_group %0;" ::"n"(LATEST) : "memory"); }

// d[16 x 8] = a[16 x 8] b[8 x 8] over a warp, in TF32. With r = lane / 4 and c = lane % 4, a lane gives
// a = (r, c), (r + 8, c), (r, c + 4), (r + 8, c + 4) and b = (c, r), (c + 4, r), and receives
// d = (r, 2c), (r, 2c + 1), (r + 8, 2c), (r + 8, 2c + 1).
DEVICE void matrix_product(float* d, const float* a, float b0, float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
        "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)), "f"(0.0f));
}
