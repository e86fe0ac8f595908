// Preloaded into a process, counts the calls of malloc and its relatives by each thread (test_allocations.py).
// glibc only.
#include <stddef.h>

extern void* __libc_malloc(size_t);
extern void* __libc_calloc(size_t, size_t);
extern void* __libc_realloc(void*, size_t);
extern void* __libc_memalign(size_t, size_t);

static __thread unsigned long calls;

unsigned long counted_calls(void) { return calls; }

void* malloc(size_t size) { ++calls; return __libc_malloc(size); }
void* calloc(size_t members, size_t size) { ++calls; return __libc_calloc(members, size); }
void* realloc(void* old, size_t size) { ++calls; return __libc_realloc(old, size); }
void* memalign(size_t alignment, size_t size) { ++calls; return __libc_memalign(alignment, size); }
void* aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }
int posix_memalign(void** out, size_t alignment, size_t size) {
  *out = memalign(alignment, size);
  return *out == NULL ? 12 : 0;
}
