#include "pool.hpp"

#include <condition_variable>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace fsl {
namespace {

class Pool {
 public:
  bool try_enter() { return calls_.try_lock(); }
  void leave() { calls_.unlock(); }

  void run(int threads, void (*work)(void*, int), void* context) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      grow(threads - 1);
      const int helpers = threads - 1 < started_ ? threads - 1 : started_;
      work_ = work;
      context_ = context;
      wanted_ = helpers;
      busy_ = helpers;
      ++generation_;
    }
    wake_.notify_all();
    work(context, 0);
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return busy_ == 0; });
  }

 private:
  // As many threads as the system allows; a call works with fewer.
  void grow(int helpers) {
    for (; started_ < helpers; ++started_) {
      try {
        std::thread(&Pool::serve, this, started_ + 1, generation_).detach();
      } catch (const std::system_error&) {
        return;
      } catch (const std::bad_alloc&) {
        return;
      }
    }
  }

  void serve(int worker, unsigned long long seen) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return generation_ != seen; });
      seen = generation_;
      if (worker > wanted_) continue;
      void (*const work)(void*, int) = work_;
      void* const context = context_;
      lock.unlock();
      work(context, worker);
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }

  std::mutex calls_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  void (*work_)(void*, int) = nullptr;
  void* context_ = nullptr;
  unsigned long long generation_ = 0;
  int started_ = 0;
  int wanted_ = 0;
  int busy_ = 0;
};

// Never destroyed: its threads sleep in it until the process ends.
Pool* pool = nullptr;

// fork() copies this thread only, and locks in any state.
void forget_pool() { pool = new (std::nothrow) Pool; }

Pool* the_pool() {
  static const bool is_made = [] {
    pool = new (std::nothrow) Pool;
#if defined(__unix__) || defined(__APPLE__)
    pthread_atfork(nullptr, nullptr, &forget_pool);
#endif
    return true;
  }();
  (void)is_made;
  return pool;
}

}  // namespace

void run_on_threads(int threads, void (*work)(void*, int), void* context) {
  if (threads > kMaximumThreads) threads = kMaximumThreads;
  Pool* const used = threads > 1 ? the_pool() : nullptr;
  if (used == nullptr || !used->try_enter()) {
    work(context, 0);
    return;
  }
  used->run(threads, work, context);
  used->leave();
}

}  // namespace fsl
