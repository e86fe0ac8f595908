// A small pool of threads for the chunks of a frame.
//
// Threads start when a call first asks for them and then sleep between calls. One call at a time uses the pool; another that comes meanwhile
// does its work alone. After fork() the child has an empty pool of its own.
#pragma once

#include <cstddef>

namespace fsl {

inline constexpr int kMaximumThreads = 64;

// Calls work(context, worker) on `threads` threads at once, this one among them as worker 0, and returns when all are done. May use fewer.
void run_on_threads(int threads, void (*work)(void* context, int worker), void* context);

}  // namespace fsl
