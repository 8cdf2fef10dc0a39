// What tests/test_pool.py calls: the pool of threads without the kernels.

#include "pool.h"

#include <atomic>
#include <chrono>

static std::atomic<int64_t> come, opened;

static void once_more(int64_t* times) { __atomic_fetch_add(times, 1, __ATOMIC_RELAXED); }

extern "C" void count_items(int64_t count, int64_t each, int64_t* times) {
  parallel(count, each, [=](int64_t item) { once_more(times + item); });
}

extern "C" void count_nested(int64_t outer, int64_t inner, int64_t each, int64_t* times) {
  parallel(outer, each, [=](int64_t i) {
    parallel(inner, each, [=](int64_t j) { once_more(times + i * inner + j); });
  });
}

// `count` items that end when all have begun: as many threads must come. Given up after a minute.
extern "C" int64_t meet(int64_t count) {
  come = 0;
  std::atomic<int64_t> met{0};
  parallel(count, 1 << 30, [&](int64_t) {
    auto end = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    come++;
    while (come < count && std::chrono::steady_clock::now() < end) {}
    if (come >= count) met++;
  });
  return met;
}

// Two items that end when another thread calls open_gate().
extern "C" void wait_at_gate() {
  parallel(2, 1 << 30, [](int64_t) {
    come++;
    while (!opened) {}
  });
}
extern "C" int64_t at_gate() { return come; }
extern "C" void open_gate() { opened = 1; }
