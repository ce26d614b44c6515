// Work shared among threads that live for one call.
#pragma once
#include <cstdint>

// Runs work(context, index) for every index below count, on at most `threads` threads, the caller's among them.
// No pool stays behind: nothing spins beside PyTorch's own threads, and a process may fork at any time.
void run_in_parallel(int64_t count, int threads, void (*work)(void* context, int64_t index), void* context);

template <class Work>
static inline void run_in_parallel(int64_t count, int threads, Work& work) {
  run_in_parallel(count, threads, [](void* context, int64_t index) { (*static_cast<Work*>(context))(index); }, &work);
}
