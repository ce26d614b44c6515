// Work shared among threads that stay, waiting for more.
#include "parallel.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

class Pool {
 public:
  // False where another thread is being served.
  bool run(int64_t count, int threads, void (*work)(void*, int64_t), void* context, int64_t patience) {
    if (busy.exchange(true, std::memory_order_acquire)) return false;
    start_helpers(threads - 1);
    const int wanted = std::min(threads - 1, helpers);
    job = {count, work, context, patience};
    next.store(0, std::memory_order_relaxed);
    finished.store(0, std::memory_order_relaxed);
    places.store(wanted, std::memory_order_release);
    jobs.fetch_add(1);
    if (asleep.load() > 0) {
      std::lock_guard<std::mutex> lock(mutex);
      wake.notify_all();
    }
    take_turns();
    const int came = wanted - places.exchange(0);  // from here on nobody else can join in
    for (int spins = 0; finished.load(std::memory_order_acquire) < came; spins++)
      spins < 10000 ? pause() : std::this_thread::yield();
    busy.store(false, std::memory_order_release);
    return true;
  }

 private:
  struct Job {
    int64_t count;
    void (*work)(void*, int64_t);
    void* context;
    int64_t patience;
  };

  void start_helpers(int wanted) {
    try {
      for (; helpers < wanted; helpers++) std::thread([this] { serve(); }).detach();
    } catch (const std::system_error&) {
      // No more threads to be had: those there are, and the caller, do all the work.
    }
  }

  void take_turns() {
    const Job mine = job;
    for (int64_t index; (index = next.fetch_add(1, std::memory_order_relaxed)) < mine.count;)
      mine.work(mine.context, index);
  }

  void serve() {
    int64_t patience = 0;
    for (uint32_t seen = 0;;) {
      await_change(seen, patience);
      seen = jobs.load();
      int free = places.load();
      while (free > 0 && !places.compare_exchange_weak(free, free - 1)) {
      }
      if (free <= 0) continue;  // too late, or not needed
      patience = job.patience;
      take_turns();
      finished.fetch_add(1, std::memory_order_release);
    }
  }

  void await_change(uint32_t seen, int64_t patience) {
    using clock = std::chrono::steady_clock;
    for (const auto end = clock::now() + std::chrono::nanoseconds(patience); clock::now() < end;)
      for (int i = 0; i < 16; i++) {
        if (jobs.load(std::memory_order_acquire) != seen) return;
        pause();
      }
    std::unique_lock<std::mutex> lock(mutex);
    asleep.fetch_add(1);  // before looking again: who changes `jobs` after that look finds somebody to wake
    wake.wait(lock, [&] { return jobs.load() != seen; });
    asleep.fetch_sub(1);
  }

  std::atomic<bool> busy{false};
  int helpers = 0;
  Job job{};
  std::atomic<int64_t> next{0};
  std::atomic<int> places{0};    // how many helpers may still join in; who takes one may read the job
  std::atomic<int> finished{0};  // how many of those that joined in have no more to do
  std::atomic<uint32_t> jobs{0};
  std::atomic<int> asleep{0};
  std::mutex mutex;
  std::condition_variable wake;
};

// Never destroyed: helpers wait in it until the process ends. A forked child has none of them, and forgets it.
std::atomic<Pool*> pool{nullptr};
[[maybe_unused]] const int forgets = pthread_atfork(nullptr, nullptr, [] { pool.store(nullptr); });

Pool& the_pool() {
  Pool* current = pool.load();
  if (!current) {
    Pool* fresh = new Pool;
    if (pool.compare_exchange_strong(current, fresh))
      current = fresh;
    else
      delete fresh;  // another thread made one meanwhile
  }
  return *current;
}

}  // namespace

void run_in_parallel(int64_t count, int threads, void (*work)(void*, int64_t), void* context, int64_t patience) {
  threads = (int)std::min<int64_t>(threads, count);
  if (threads > 1 && the_pool().run(count, threads, work, context, patience)) return;
  for (int64_t index = 0; index < count; index++) work(context, index);
}
