/* Instructions that the CPU of a test may lack, in plain C: included before a source, they take the place of
   the compiler's own. */

#include <immintrin.h>
#include <stdint.h>

#ifdef EMULATE_AVXVNNI
#define __AVXVNNI__ 1
#define _mm256_dpbusd_avx_epi32(sum, x, w) emulated_dpbusd(sum, x, w)
static inline __m256i emulated_dpbusd(__m256i sum, __m256i x, __m256i w) {
    union {
        __m256i all;
        int32_t sums[8];
        uint8_t x[32];
        int8_t w[32];
    } to = {sum}, left = {x}, right = {w};
    for (int i = 0; i < 8; i++) {
        uint32_t total = to.sums[i]; /* the instruction wraps */
        for (int j = 0; j < 4; j++) total += left.x[4 * i + j] * right.w[4 * i + j];
        to.sums[i] = total;
    }
    return to.all;
}
#endif
