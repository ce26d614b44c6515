// Work shared among threads that stay, waiting for more.
#pragma once
#include <cstdint>

// How long helpers look out for more work before they sleep. Waking them takes tens of microseconds; a step of decoding
// shares out work every few. Everything else sleeps at once, so as not to spin beside PyTorch's own threads.
constexpr int64_t SLEEP_AT_ONCE = 0, MORE_COMES_SOON = 100000;  // nanoseconds

// Runs work(context, index) for every index below count, on at most `threads` threads, the caller's among them. A helper
// that wakes too late is not waited for, and a caller that finds the helpers busy with another's work does its own alone.
// After a fork the child starts helpers of its own.
void run_in_parallel(int64_t count, int threads, void (*work)(void* context, int64_t index), void* context,
                     int64_t patience = SLEEP_AT_ONCE);

template <class Work>
static inline void run_in_parallel(int64_t count, int threads, Work& work, int64_t patience = SLEEP_AT_ONCE) {
  auto call = [](void* context, int64_t index) { (*static_cast<Work*>(context))(index); };
  run_in_parallel(count, threads, call, &work, patience);
}

// row(t, unit) for every row of a tensor, in units of neighbouring rows: their size and not the number of threads decides
// which rows share what a unit leaves.
template <class Row>
static inline void for_rows(int64_t rows, int64_t rows_of_a_unit, int64_t threads, Row row) {
  auto work = [&](int64_t unit) {
    const int64_t end = (unit + 1) * rows_of_a_unit;
    for (int64_t t = unit * rows_of_a_unit; t < (end < rows ? end : rows); t++) row(t, unit);
  };
  run_in_parallel((rows + rows_of_a_unit - 1) / rows_of_a_unit, (int)threads, work);
}

// As run_in_parallel, in a few stretches of neighbouring indices for each thread: memory is fastest when a thread reads much of it
// from front to back. What comes next comes soon.
template <class Work>
static inline void run_in_stretches(int64_t count, int64_t threads, Work work) {
  const int64_t stretches = count < 4 * threads ? count : 4 * threads;
  auto stretch = [&](int64_t i) {
    for (int64_t index = count * i / stretches; index < count * (i + 1) / stretches; index++) work(index);
  };
  run_in_parallel(stretches, (int)threads, stretch, MORE_COMES_SOON);
}
