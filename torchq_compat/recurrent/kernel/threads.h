// The threads of the cell loop: those of OpenMP, or of the standard library for ThreadSanitizer, which does
// not recognise libgomp's barriers.

#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

#ifdef TORCHQ_COMPAT_STD_THREADS
#include <vector>
#elif defined(_OPENMP)
#include <omp.h>
#include <pthread.h>
#endif

struct Worker {
  int64_t index, count;
};

// Threads normally meet within a microsecond, since a step takes only a few. A thread that waits longer,
// because another one lost its core, yields.
class Barrier {
 public:
  void wait(int64_t threads) {
    const int64_t round = round_.load(std::memory_order_relaxed);
    if (waiting_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
      waiting_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int64_t spins = 0; round_.load(std::memory_order_acquire) == round; ++spins) {
      if (spins > kSpins) {
        std::this_thread::yield();
      } else {
        pause();
      }
    }
  }

 private:
  static constexpr int64_t kSpins = 1000;
  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  alignas(64) std::atomic<int64_t> waiting_{0};
  alignas(64) std::atomic<int64_t> round_{0};
};

#ifdef TORCHQ_COMPAT_STD_THREADS

class Team {
 public:
  explicit Team(int64_t threads) : threads_(threads) {}

  // Calls work(worker) in every thread.
  template <class Work>
  void run(Work work) {
    std::vector<std::thread> others;
    for (int64_t index = 1; index < threads_; ++index) {
      others.emplace_back([&work, index, this] { work(Worker{index, threads_}); });
    }
    work(Worker{0, threads_});
    for (std::thread& other : others) other.join();
  }

  // Waits until every thread has called it.
  void barrier(const Worker& worker) {
    if (worker.count > 1) barrier_.wait(worker.count);
  }

 private:
  const int64_t threads_;
  Barrier barrier_;
};

// The number of threads that can be used, at most `wanted` and at least one.
inline int64_t usable_threads(int64_t wanted) { return wanted < 1 ? 1 : wanted; }

#else

#ifdef _OPENMP
// The threads of OpenMP do not exist in the child of a fork, which would wait for them forever. A child whose
// parent has used several threads computes with one.
inline std::atomic<bool> threads_were_used{false}, threads_are_lost{false};

inline int64_t usable_threads(int64_t wanted) {
  static const int watched =
      pthread_atfork(nullptr, nullptr, [] { threads_are_lost = threads_are_lost || threads_were_used; });
  if (wanted < 2 || watched != 0 || threads_are_lost) return 1;
  threads_were_used = true;
  return wanted;
}
#else
inline int64_t usable_threads(int64_t) { return 1; }
#endif

class Team {
 public:
  explicit Team(int64_t threads) : threads_(threads) {}

  // Calls work(worker) in every thread. A single thread does not use OpenMP, whose threads are gone after a
  // fork.
  template <class Work>
  void run(Work work) {
#ifdef _OPENMP
    if (threads_ > 1) {
#pragma omp parallel num_threads(static_cast<int>(threads_))
      work(Worker{omp_get_thread_num(), omp_get_num_threads()});
      return;
    }
#endif
    work(Worker{0, 1});
  }

  void barrier(const Worker& worker) {
    if (worker.count > 1) barrier_.wait(worker.count);
  }

 private:
  const int64_t threads_;
  Barrier barrier_;
};

#endif
