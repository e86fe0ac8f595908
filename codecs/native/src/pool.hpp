// A small pool of threads for the chunks of a frame.
//
// Threads start when a call first needs them, and sleep between calls. One call at a time uses the
// pool; another call at the same time works alone. After fork() the child has an empty pool.
#pragma once

#include <cstddef>

namespace fsl {

inline constexpr int kMaximumThreads = 64;

// Calls work(context, worker) on at most `threads` threads at once, this one being worker 0, and
// returns when all are done.
void run_on_threads(int threads, void (*work)(void* context, int worker), void* context);

}  // namespace fsl
