// The threads of the cell loop: those of OpenMP, or of the standard library, which ThreadSanitizer knows
// (it takes libgomp's barriers for none).

#pragma once

#include <cstdint>

#ifdef TORCHQ_COMPAT_STD_THREADS
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>
#elif defined(_OPENMP)
#include <omp.h>
#include <pthread.h>

#include <atomic>
#endif

struct Worker {
  int64_t index, count;
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

  // Waits until every thread is here.
  void barrier() {
    std::unique_lock<std::mutex> lock(mutex_);
    const int64_t round = round_;
    if (++waiting_ == threads_) {
      waiting_ = 0;
      ++round_;
      all_here_.notify_all();
    } else {
      all_here_.wait(lock, [&] { return round_ != round; });
    }
  }

 private:
  const int64_t threads_;
  int64_t waiting_ = 0, round_ = 0;
  std::mutex mutex_;
  std::condition_variable all_here_;
};

// How many of `wanted` threads can be had, at least one.
inline int64_t usable_threads(int64_t wanted) { return wanted < 1 ? 1 : wanted; }

#else

#ifdef _OPENMP
// Threads of OpenMP stay in the parent of a fork, and a child would wait for them for ever: where several
// were used before, it computes with one.
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

  // A single thread stays out of OpenMP, whose threads are gone after a fork.
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

  void barrier() {
#ifdef _OPENMP
    if (threads_ > 1) {
#pragma omp barrier
    }
#endif
  }

 private:
  const int64_t threads_;
};

#endif
