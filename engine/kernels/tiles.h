/* Sums of products of bytes for up to TILE_ROWS rows at once, by AMX; without it TILE_ROWS is 0. */

#if defined(__AMX_INT8__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#define TILE_ROWS 16
#define TILE_BYTES 64 /* of a row of a tile */

/* Returns whether this process may use tiles; the system reserves memory for them when it is asked first. */
static int tiles_allowed(void) {
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    return !syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA);
}

/* What the compiler has not written yet, an instruction on tiles would not read. */
#define ALL_WRITTEN __asm__ volatile("" ::: "memory")

/* Tile 0: sums of M rows.  Tile 1: the rows.  Tile 2: weights of 16 outputs. */
INLINE void begin_tiles(int64_t M) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shapes = {1, 0, {0}, {TILE_BYTES, TILE_BYTES, TILE_BYTES}, {M, M, TILE_ROWS}};
    ALL_WRITTEN;
    _tile_loadconfig(&shapes);
}

/* Writes sums[M,16] of 64 unsigned bytes of each row and signed ones of 16 outputs, which lie by fours. */
INLINE void tile_sums(const uint8_t *x, int64_t x_step, const char *w, int64_t w_step, int32_t *sums) {
    ALL_WRITTEN;
    _tile_zero(0);
    _tile_loadd(1, x, x_step);
    _tile_loadd(2, w, w_step);
    _tile_dpbusd(0, 1, 2);
    _tile_stored(0, sums, TILE_BYTES);
}

#define end_tiles() _tile_release()
#else
#define TILE_ROWS 0
#define tiles_allowed() 0
#endif
