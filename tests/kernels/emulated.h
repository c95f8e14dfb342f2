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

#ifdef EMULATE_AVX512BF16
#define __AVX512BF16__ 1
#define _mm512_dpbf16_ps(sum, x, w) emulated_dpbf16(sum, x, w)
static inline __m512 emulated_dpbf16(__m512 sum, __m512bh x, __m512bh w) {
    union {
        __m512bh all;
        uint32_t pairs[16];
    } left = {x}, right = {w};
    union {
        __m512 all;
        float sums[16];
    } to = {sum};
    for (int i = 0; i < 16; i++)
        for (int shift = 16; shift >= 0; shift -= 16) { /* the upper halves first */
            uint32_t a = left.pairs[i] >> shift << 16, b = right.pairs[i] >> shift << 16;
            float one, other;
            __builtin_memcpy(&one, &a, 4);
            __builtin_memcpy(&other, &b, 4);
            to.sums[i] += one * other;
        }
    return to.all;
}
#endif
