/* Memory that runs out when a test says so: the compiler reads this before each source of engine/kernels. */

#include <stdint.h>
#include <stdlib.h>

/* How many calls of malloc still succeed. */
__attribute__((weak)) int64_t mallocs_left = INT64_MAX;

static inline void *malloc_or_none(size_t size) {
    return __atomic_fetch_sub(&mallocs_left, 1, __ATOMIC_RELAXED) > 0 ? malloc(size) : NULL;
}

#define malloc(size) malloc_or_none(size)
