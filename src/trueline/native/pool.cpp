#include "pool.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

// Numbers read by one run of items: some microseconds. Shorter ones cost more to hand out than they
// gain, longer ones make a thread wait for the last. A thread takes a quarter of what is left of a
// slice, at most MOST_RUNS: the atomic operation that takes them waits for every read before it.
constexpr int64_t RUN = 32768;
constexpr uint64_t MOST_RUNS = 8;
constexpr int64_t MOST_THREADS = 256;
typedef std::chrono::steady_clock Clock;
// How long a thread looks for work before it sleeps: longer than a step takes between two calls.
constexpr std::chrono::microseconds LOOK(200);

static inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

// Looks until ready() for up to LOOK.
template <typename Ready>
static bool look(Ready ready) {
  auto end = Clock::now() + LOOK;
  do {
    for (int i = 0; i < 16; i++) {
      if (ready()) return true;
      relax();
    }
  } while (Clock::now() < end);
  return false;
}

// Runs first .. stop of a call that nobody has taken yet: its number, then both.
struct Slice {
  static constexpr int BITS = 20;
  static constexpr uint64_t MOST = (1 << BITS) - 1;
  static uint64_t made(uint64_t number, uint64_t first, uint64_t stop) {
    return number << 2 * BITS | first << BITS | stop;
  }
  static uint64_t first(uint64_t slice) { return slice >> BITS & MOST; }
  static uint64_t stop(uint64_t slice) { return slice & MOST; }
  static bool open(uint64_t slice) { return first(slice) < stop(slice); }
  static uint64_t portion(uint64_t slice) {
    uint64_t runs = stop(slice) - first(slice);
    return std::min(std::max<uint64_t>(runs / 4, 1), MOST_RUNS);
  }

  alignas(64) std::atomic<uint64_t> left{0};
};

// One call at a time. Every thread begins with a slice of its own, where memory follows on memory,
// and then helps with the others'. What else describes a call is read before a run is taken and
// counts only if the taking succeeds: it changes only while there is nothing to take.
class Pool {
 public:
  // False if another thread is at it, or this one (a call within a call).
  bool enter() { return !taken_.exchange(true, std::memory_order_acquire); }
  void leave() { taken_.store(false, std::memory_order_release); }

  void call(int64_t threads, int64_t count, int64_t run, Items items, const void* what) {
    start(threads - 1);
    run = std::max<int64_t>(run, (count + Slice::MOST - 1) / Slice::MOST);
    uint64_t runs = (count + run - 1) / run;
    count_ = count;
    run_ = run;
    items_ = items;
    what_ = what;
    undone_ = runs;
    slices_ = threads;
    number_++;
    for (int64_t i = 0; i < threads; i++)
      left_[i].left = Slice::made(number_, runs * i / threads, runs * (i + 1) / threads);
    if (sleeping_) {
      std::lock_guard<std::mutex> hold(mutex_);
      work_.notify_all();
    }
    help(0);
    auto done = [&] { return undone_ == 0; };
    if (look(done)) return;
    std::unique_lock<std::mutex> hold(mutex_);
    waiting_ = true;
    done_.wait(hold, done);
    waiting_ = false;
  }

 private:
  void start(int64_t helpers) {
    if (started_ >= helpers) return;
    sigset_t all, before;  // signals are for the threads of the program
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      for (; started_ < helpers; started_++) std::thread(&Pool::work, this, started_ + 1).detach();
    } catch (const std::system_error&) {  // no more to be had: those that there are do it
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  // Until nothing is left to take, from a thread's own slice on. Told once, at the end: a counter
  // that all threads change at every run costs as much as a short run.
  void help(int64_t place) {
    int64_t done = 0;
    for (int64_t i = 0, slices = slices_; i < slices; i++)
      while (int64_t runs = take(left_[(place + i) % slices].left)) done += runs;
    if (done && (undone_ -= done) == 0 && waiting_) {
      std::lock_guard<std::mutex> hold(mutex_);
      done_.notify_one();
    }
  }

  // Does some runs of a slice: how many, 0 if none is left.
  int64_t take(std::atomic<uint64_t>& slice) {
    uint64_t left = slice;
    while (Slice::open(left)) {
      int64_t count = count_, run = run_;
      Items items = items_;
      const void* what = what_;
      uint64_t runs = Slice::portion(left);
      if (!slice.compare_exchange_weak(left, left + (runs << Slice::BITS))) continue;
      int64_t first = Slice::first(left) * run, stop = first + runs * run;
      items(what, first, std::min(stop, count));
      return runs;
    }
    return 0;
  }

  void work(int64_t place) {
    auto wanted = [&] {
      int64_t slices = slices_;
      if (place >= slices) return false;
      for (int64_t i = 0; i < slices; i++)
        if (Slice::open(left_[(place + i) % slices].left)) return true;
      return false;
    };
    for (;;) {
      if (!look(wanted)) {
        std::unique_lock<std::mutex> hold(mutex_);
        sleeping_++;
        work_.wait(hold, wanted);
        sleeping_--;
      }
      help(place);
    }
  }

  Slice left_[MOST_THREADS];
  // Read at every run, so apart from what changes during a call.
  alignas(64) std::atomic<int64_t> count_{0}, run_{1}, slices_{0};
  std::atomic<Items> items_{nullptr};
  std::atomic<const void*> what_{nullptr};
  alignas(64) std::atomic<int64_t> undone_{0};
  std::atomic<bool> taken_{false}, waiting_{false};
  std::atomic<int> sleeping_{0};
  uint64_t number_ = 0;
  int64_t started_ = 0;
  std::mutex mutex_;
  std::condition_variable work_, done_;
};

static std::atomic<int64_t> threads{1};
// Never destroyed: threads sleep in it until the process ends. A child of fork has no threads but
// the one that forked, so it starts anew.
static std::atomic<Pool*> pool{new Pool};
static int forgotten = pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });

void share(int64_t count, int64_t each, Items items, const void* call) {
  int64_t run = each < RUN ? RUN / (each > 0 ? each : 1) : 1;
  if (count <= run || threads == 1) return items(call, 0, count);
  Pool* current = pool;
  if (!current->enter()) return items(call, 0, count);
  current->call(threads, count, run, items, call);
  current->leave();
}

extern "C" void use_threads(int64_t count) {
  threads = std::min(std::max<int64_t>(count, 1), MOST_THREADS);
}
