// Which of the compiled instruction sets this machine can run.
extern "C" __attribute__((visibility("default"))) const char* blackmamba_best_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl"))
    return "avx512";
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "avx2";
#endif
  return "plain";
}

// Digest of the sources, by which the package knows a library that is older than they are.
extern "C" __attribute__((visibility("default"))) const char* blackmamba_built_from() { return BLACKMAMBA_SOURCES; }
