// Work shared among threads that live for one call.
#include "parallel.h"

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

void run_in_parallel(int64_t count, int threads, void (*work)(void*, int64_t), void* context) {
  std::atomic<int64_t> next{0};
  auto take_turns = [&] {
    for (int64_t index; (index = next.fetch_add(1, std::memory_order_relaxed)) < count;) work(context, index);
  };
  std::vector<std::thread> helpers;
  try {
    for (int64_t i = 1; i < std::min<int64_t>(threads, count); i++) helpers.emplace_back(take_turns);
  } catch (const std::system_error&) {
    // No more threads to be had: those that started, and this one, do all the work.
  }
  take_turns();
  for (auto& helper : helpers) helper.join();
}
