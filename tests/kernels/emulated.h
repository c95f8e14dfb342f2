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

#ifdef EMULATE_AMX
#include <sys/syscall.h>
#include <unistd.h>
#define __AMX_INT8__ 1
#undef _tile_loadconfig
#undef _tile_zero
#undef _tile_loadd
#undef _tile_dpbusd
#undef _tile_stored
#undef _tile_release
#define _tile_loadconfig(from) emulated_shapes(from)
#define _tile_zero(to) __builtin_memset(emulated_tiles[to].bytes, 0, sizeof emulated_tiles[to].bytes)
#define _tile_loadd(to, from, step) emulated_load(emulated_tiles + (to), from, step)
#define _tile_dpbusd(to, x, w) emulated_tile_dot(emulated_tiles + (to), emulated_tiles + (x), emulated_tiles + (w))
#define _tile_stored(from, to, step) emulated_store(emulated_tiles + (from), to, step)
#define _tile_release() (void)(emulated_tiles[0].rows = 0)
#define syscall(number, request, feature) ((request) != 0x1023 || (feature) != 18)
typedef struct {
    int rows, row_bytes;
    union {
        uint8_t bytes[16][64];
        int32_t sums[16][16];
    };
} EmulatedTile;
static _Thread_local EmulatedTile emulated_tiles[8]; /* without shapes a tile has no rows: it loads and stores nothing */

static inline void emulated_shapes(const void *from) {
    const uint8_t *shapes = from;
    if (shapes[0] != 1) __builtin_trap();
    for (int tile = 0; tile < 8; tile++) {
        emulated_tiles[tile].row_bytes = shapes[16 + 2 * tile] + 256 * shapes[17 + 2 * tile];
        emulated_tiles[tile].rows = shapes[48 + tile];
        if (emulated_tiles[tile].rows > 16 || emulated_tiles[tile].row_bytes > 64) __builtin_trap();
    }
}
static inline void emulated_load(EmulatedTile *to, const void *from, int64_t step) {
    __builtin_memset(to->bytes, 0, sizeof to->bytes);
    for (int row = 0; row < to->rows; row++)
        __builtin_memcpy(to->bytes[row], (const char *)from + row * step, to->row_bytes);
}
static inline void emulated_store(EmulatedTile *from, void *to, int64_t step) {
    for (int row = 0; row < from->rows; row++)
        __builtin_memcpy((char *)to + row * step, from->bytes[row], from->row_bytes);
}
static inline void emulated_tile_dot(EmulatedTile *to, const EmulatedTile *x, const EmulatedTile *w) {
    if (x->row_bytes != 4 * w->rows || to->rows != x->rows || to->row_bytes != w->row_bytes) __builtin_trap();
    for (int m = 0; m < to->rows; m++)
        for (int o = 0; o < to->row_bytes / 4; o++)
            for (int i = 0; i < x->row_bytes; i++)
                to->sums[m][o] += x->bytes[m][i] * (int8_t)w->bytes[i / 4][4 * o + i % 4];
}
#endif
