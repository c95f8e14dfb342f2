/* Products y[T,O] = x[T,I] W[O,I]^T + bias of float32 rows with weights of 4 to 8 bits, as a file stores them.
   engine/kernels/blocks.py calls them.

   A weight is integers q with scales: w = scale (q - zero), or scale q + minimum.  They lie in panels of V outputs, with
   the file's number of bytes.  A row of the input is rounded to integers with a scale per group, of one byte (rounded)
   or of three (as exact as float32), and products of bytes are summed as integers.  An output is one sum over the
   groups in their order, so a row has the same bits whatever other rows, tiles and threads there are.

   Legend: T rows, I inputs, O outputs, V outputs of a panel, G inputs that share a scale, M rows and N panels of a
   tile. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cpu.h"
#include "vectors.h"

#ifdef V

/* As in products.c: UNIT 1 and above have the tiles of one kind each. */
#ifdef UNIT
#define HAS(unit) (UNIT == (unit))
#else
#define HAS(unit) 1
#endif

/* PLAIN: a scale per group.  MINIMUM: a scale and a minimum.  CODED: a power of two per group, and floats of 4 bits.  ZERO: a scale and a zero point per block of several groups;
   ZERO_UPPER: the same with a scale in bfloat16.  SUPER: an integer scale per group, times a float scale per block.
   SUPER_MINIMUM: the same with integer minima, times another float. */
enum { PLAIN, MINIMUM, CODED, ZERO, ZERO_UPPER, SUPER, SUPER_MINIMUM };
/* A kind is the bits and the form of a tile; formats of one kind differ by their blocks in the file. */
enum { PLAIN4, MINIMUM4, PLAIN5, MINIMUM5, PLAIN8, SUPER_MINIMUM4, SUPER_MINIMUM5, SUPER6, CODED4, ZERO4, ZERO_UPPER4, KINDS };
/* The last six are of safetensors files, with a block per scale; formats/integers.py orders their integers. */
enum { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, MXFP4, HALF32, HALF64, HALF128, UPPER32, UPPER64, UPPER128, FORMATS };

#define SPAN 256

/* The numbers of a float of 4 bits, 0 to 6 and 0 to -6, doubled and from 0. */
#define ZERO_CODE 12
static const uint8_t CODES[16] __attribute__((aligned(16))) = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

typedef struct {
    int64_t kind, bits, form, group, zero;
    int64_t size, bytes; /* elements and bytes of a block of the file */
} Format;

#if HAS(0)
static const Format TABLE[FORMATS] = {
    [Q4_0] = {PLAIN4, 4, PLAIN, 32, 8, 32, 18},
    [Q4_1] = {MINIMUM4, 4, MINIMUM, 32, 0, 32, 20},
    [Q5_0] = {PLAIN5, 5, PLAIN, 32, 16, 32, 22},
    [Q5_1] = {MINIMUM5, 5, MINIMUM, 32, 0, 32, 24},
    [Q8_0] = {PLAIN8, 8, PLAIN, 32, 128, 32, 34},
    [Q4_K] = {SUPER_MINIMUM4, 4, SUPER_MINIMUM, 32, 0, SPAN, 144},
    [Q5_K] = {SUPER_MINIMUM5, 5, SUPER_MINIMUM, 32, 0, SPAN, 176},
    [Q6_K] = {SUPER6, 6, SUPER, 16, 32, SPAN, 210},
    [MXFP4] = {CODED4, 4, CODED, 32, ZERO_CODE, 32, 17},
    [HALF32] = {ZERO4, 4, ZERO, 32, 0, 32, 19},
    [HALF64] = {ZERO4, 4, ZERO, 32, 0, 64, 35},
    [HALF128] = {ZERO4, 4, ZERO, 32, 0, 128, 67},
    [UPPER32] = {ZERO_UPPER4, 4, ZERO_UPPER, 32, 0, 32, 19},
    [UPPER64] = {ZERO_UPPER4, 4, ZERO_UPPER, 32, 0, 64, 35},
    [UPPER128] = {ZERO_UPPER4, 4, ZERO_UPPER, 32, 0, 128, 67},
};
#endif

#define MOST_PANELS 4
#define MOST_ROWS (REGISTERS == 16 ? 4 : 8)
#define panels_of(M) (REGISTERS == 16 ? (M) == 1 ? 4 : (M) <= 3 ? 2 : 1 : (M) <= 2 ? 4 : (M) <= 6 ? 2 : 1)
#define MOST_GROUP 32
#define ROW_BLOCK_BYTES (384 << 10)
#define AT_ONCE 4 /* multiplications that take as long as a number of other loops */

/* Bytes of a panel before the groups of a block, and before the integers of a group. */
INLINE int64_t block_header(int64_t form) {
    return form == SUPER_MINIMUM ? 4 * V : form >= SUPER ? 2 * V : form >= ZERO ? 3 * V : 0;
}
INLINE int64_t group_header(int64_t form) {
    return form == MINIMUM ? 4 * V : form == PLAIN || form == SUPER_MINIMUM ? 2 * V : form == SUPER || form == CODED ? V : 0;
}

INLINE int64_t group_bytes(const Format *is) { return group_header(is->form) + V * is->group * is->bits / 8; }
INLINE int64_t block_bytes(const Format *is) {
    return block_header(is->form) + is->size / is->group * group_bytes(is);
}

#if HAS(0)
static int64_t panels_in(int64_t O) { return (O + MOST_PANELS * V - 1) / (MOST_PANELS * V) * MOST_PANELS; }

int64_t blocks_bytes(int64_t format, int64_t O, int64_t I) {
    const Format *is = TABLE + format;
    return panels_in(O) * (I / is->size) * block_bytes(is);
}

/* One block of the file: its integers, from 0, and its scales as stored.  zero: minus the zero point. */
typedef struct {
    uint8_t q[SPAN];
    uint16_t scale, minimum;
    int8_t scales[16], minima[8], zero;
} Block;

INLINE uint16_t half_at(const uint8_t *from) {
    uint16_t half;
    memcpy(&half, from, sizeof half);
    return half;
}

INLINE uint32_t word_at(const void *from) {
    uint32_t word;
    memcpy(&word, from, sizeof word);
    return word;
}

INLINE void read_nibbles(const uint8_t *from, uint8_t *q, const int count) {
    for (int i = 0; i < count; i++) q[i] = from[i] & 15, q[i + count] = from[i] >> 4;
}

/* Adds the highest bits of eight integers, which a byte has. */
INLINE void read_fifth_bits(uint8_t bits, uint8_t *q) {
    uint64_t eight, each = bits * UINT64_C(0x0101010101010101) & UINT64_C(0x8040201008040201);
    memcpy(&eight, q, sizeof eight);
    eight |= (each + UINT64_C(0x7f7f7f7f7f7f7f7f)) >> 3 & UINT64_C(0x1010101010101010);
    memcpy(q, &eight, sizeof eight);
}

/* The 6-bit scales and minima of Q4_K and Q5_K, in 12 bytes. */
INLINE void read_scales(const uint8_t *from, Block *to) {
    for (int j = 0; j < 4; j++) {
        to->scales[j] = from[j] & 63;
        to->minima[j] = from[j + 4] & 63;
        to->scales[j + 4] = (from[j + 8] & 15) | from[j] >> 6 << 4;
        to->minima[j + 4] = from[j + 8] >> 4 | from[j + 4] >> 6 << 4;
    }
}

INLINE void read_block(const int64_t format, const uint8_t *from, Block *to) {
    const uint8_t *high;
    to->minimum = 0;
    to->scale = half_at(format == Q6_K ? from + 208 : from);
    switch (format) {
    case Q4_0: read_nibbles(from + 2, to->q, 16); return;
    case Q4_1:
        to->minimum = half_at(from + 2);
        read_nibbles(from + 4, to->q, 16);
        return;
    case Q5_0:
    case Q5_1:
        if (format == Q5_1) to->minimum = half_at(from + 2), from += 2;
        read_nibbles(from + 6, to->q, 16);
        for (int i = 0; i < 4; i++) read_fifth_bits(from[2 + i], to->q + i * 8);
        return;
    case Q8_0:
        for (int i = 0; i < 32; i++) to->q[i] = from[2 + i] ^ 128;
        return;
    case Q4_K:
    case Q5_K:
        to->minimum = half_at(from + 2) ^ 0x8000; /* a block's minimum is subtracted */
        read_scales(from + 4, to);
        high = from + 16, from += format == Q5_K ? 48 : 16;
        for (int j = 0; j < 4; j++) read_nibbles(from + 32 * j, to->q + 64 * j, 32);
        for (int j = 0; format == Q5_K && j < 8; j++)
            for (int i = 0; i < 32; i++) to->q[j * 32 + i] |= (high[i] >> j & 1) << 4;
        return;
    case MXFP4: /* a number is half of an integer; weights below 2^-123 become 0 */
        to->scale = from[0] ? from[0] - 1 : 0;
        read_nibbles(from + 1, to->q, 16);
        return;
    case Q6_K:
        memcpy(to->scales, from + 192, 16);
        for (int j = 0; j < 8; j++) {
            const uint8_t *low = from + j / 4 * 64 + j % 2 * 32;
            high = from + 128 + j / 4 * 32;
            for (int i = 0; i < 32; i++)
                to->q[j * 32 + i] = (low[i] >> j / 2 % 2 * 4 & 15) | (high[i] >> j % 4 * 2 & 3) << 4;
        }
        return;
    default:
        to->zero = -from[2];
        read_nibbles(from + 3, to->q, TABLE[format].size / 2);
    }
}

/* Writes the integers of a group of output o, four at a time. */
INLINE void write_group(const Format *is, const uint8_t *q, uint8_t *to, int64_t o) {
    uint32_t high = 0;
    for (int64_t k = 0; k < is->group / 4; k++) {
        uint32_t four = word_at(q + k * 4), low = four & 0x0f0f0f0f;
        if (is->bits == 8) memcpy(to + (k * V + o) * 4, &four, sizeof four);
        else if (k % 2 == 0) {
            low |= (word_at(q + k * 4 + 4) & 0x0f0f0f0f) << 4;
            memcpy(to + (k / 2 * V + o) * 4, &low, sizeof low);
        }
        high |= (four >> 4 & 0x0f0f0f0f) << k * (is->bits - 4);
    }
    if (is->bits == 5 || is->bits == 6) memcpy(to + (is->group / 8 * V + o) * 4, &high, sizeof high);
}

INLINE void write_block(const Format *is, const Block *block, char *to, int64_t o) {
    if (is->form >= ZERO) memcpy(to + o * 2, &block->scale, 2);
    if (is->form == ZERO || is->form == ZERO_UPPER) to[2 * V + o] = block->zero;
    if (is->form == SUPER_MINIMUM) memcpy(to + (V + o) * 2, &block->minimum, 2);
    to += block_header(is->form);
    for (int64_t g = 0; g < is->size / is->group; g++, to += group_bytes(is)) {
        if (is->form < CODED) memcpy(to + o * 2, &block->scale, 2);
        if (is->form == CODED) to[o] = block->scale;
        if (is->form == MINIMUM) memcpy(to + (V + o) * 2, &block->minimum, 2);
        if (is->form >= SUPER) to[o] = block->scales[g];
        if (is->form == SUPER_MINIMUM) to[V + o] = block->minima[g];
        write_group(is, block->q + g * is->group, (uint8_t *)to + group_header(is->form), o);
    }
}

INLINE int is_finite(const Format *is, uint16_t scale) {
    uint16_t exponent = is->form == CODED ? 254 : is->form == ZERO_UPPER ? 0x7f80 : 0x7c00;
    return (scale & exponent) != exponent;
}

/* Fills a panel with outputs from o on.  Returns how many scales are NaN or infinite. */
INLINE int64_t pack_panel(const int64_t format, int64_t O, int64_t blocks, const uint8_t *rows, char *panel,
                          int64_t first) {
    const Format is = TABLE[format];
    int64_t wrong = 0;
    memset(panel, 0, blocks * block_bytes(&is));
    for (int64_t o = 0; o < V && first + o < O; o++)
        for (int64_t b = 0; b < blocks; b++) {
            Block block;
            read_block(format, rows + ((first + o) * blocks + b) * is.bytes, &block);
            wrong += !is_finite(&is, block.scale) + !is_finite(&is, block.minimum);
            write_block(&is, &block, panel + b * block_bytes(&is), o);
        }
    return wrong;
}

/* rows: of O outputs, each I / size blocks, as their file stores them.  panels: ``blocks_bytes`` of memory, which this
   fills.  Returns how many scales are NaN or infinite. */
int64_t blocks_pack(int64_t format, int64_t O, int64_t I, const uint8_t *rows, char *panels, int64_t threads) {
    int64_t count = panels_in(O), blocks = I / TABLE[format].size, size = blocks * block_bytes(TABLE + format), wrong = 0;
/* A function for each format, whose loops have a known length. */
#define PACK(F) \
    case F: wrong += pack_panel(F, O, blocks, rows, panels + p * size, p * V); break;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(+ : wrong)
    for (int64_t p = 0; p < count; p++)
        switch (format) {
            PACK(Q4_0) PACK(Q4_1) PACK(Q5_0) PACK(Q5_1) PACK(Q8_0) PACK(Q4_K) PACK(Q5_K) PACK(Q6_K)
            PACK(MXFP4) PACK(HALF32) PACK(HALF64) PACK(HALF128) PACK(UPPER32) PACK(UPPER64) PACK(UPPER128)
        }
#undef PACK
    return wrong;
}

/* Consecutive outputs of a weight that are stored alike.  parts: bytes of an input element. */
typedef struct {
    const char *panels;
    int64_t format, O, parts;
} Blocks;

static float value_of(const Format *is, uint16_t scale) {
    uint32_t bits = (uint32_t)scale << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return is->form == ZERO_UPPER ? value : float_of_half(scale);
}

static float power_of(uint8_t exponent) {
    uint32_t bits = (uint32_t)exponent << 23;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static int whole_at(const Format *is, const uint8_t *group, int64_t o, int64_t i) {
    int64_t k = i / 4, at = o * 4 + i % 4;
    if (is->bits == 8) return group[k * V * 4 + at];
    int low = group[k / 2 * V * 4 + at] >> k % 2 * 4 & 15;
    if (is->form == CODED) return CODES[low];
    if (is->bits == 4) return low;
    return low | (group[is->group / 8 * V * 4 + at] >> k * (is->bits - 4) & ((1 << (is->bits - 4)) - 1)) << 4;
}

static void read_row(const Blocks *blocks, int64_t I, int64_t row, float *out) {
    const Format *is = TABLE + blocks->format;
    const char *at = blocks->panels + row / V * (I / is->size) * block_bytes(is);
    int64_t o = row % V;
    for (int64_t first = 0; first < I; first += is->size) {
        const uint8_t *header = (const uint8_t *)at;
        at += block_header(is->form);
        for (int64_t g = 0; g < is->size / is->group; g++, at += group_bytes(is)) {
            const uint8_t *group = (const uint8_t *)at;
            const uint8_t *halves = is->form >= ZERO ? header : group;
            float scale = is->form == CODED ? power_of(group[o]) : value_of(is, half_at(halves + o * 2)), least = 0;
            int64_t zero = is->form == ZERO || is->form == ZERO_UPPER ? -(int8_t)header[2 * V + o] : is->zero;
            if (is->form == MINIMUM || is->form == SUPER_MINIMUM) least = value_of(is, half_at(halves + (V + o) * 2));
            if (is->form >= SUPER) scale *= (int8_t)group[o], least *= is->form == SUPER_MINIMUM ? group[V + o] : 0;
            for (int64_t i = 0; i < is->group; i++)
                *out++ = scale * (whole_at(is, group + group_header(is->form), o, i) - zero) + least;
        }
    }
}

/* Writes the rows of these outputs as floats. */
void blocks_rows(const Weight *weight, const int64_t *outputs_T, float *out_TI, int64_t T) {
    for (int64_t t = 0; t < T; t++) {
        const Blocks *blocks = weight->panels;
        int64_t row = outputs_T[t];
        while (row >= blocks->O) row -= blocks++->O;
        read_row(blocks, weight->I, row, out_TI + t * weight->I);
    }
}

#endif

/* The rows of a tile.  bytes[M,groups,parts,G]: digits, the lowest first; scales[M,groups,parts]: of a digit; starts:
   the digits' sum times minus the zero; sums[M,groups]: of the rounded inputs.  in_block: groups of a block. */
typedef struct {
    const int8_t *bytes;
    const float *scales, *sums;
    const int32_t *starts;
    int64_t groups, in_block, parts;
} Input;

/* Integers of V outputs and of inputs 4k to 4k + 3 of a group. */
INLINE Integers element(const char *low, Integers high, const int k, const int bits, const int form) {
    if (bits == 8) return load_bytes(low + k * V * 4);
    Integers pair = load_bytes(low + k / 2 * V * 4);
    Integers four = both(k % 2 ? right(pair, 4) : pair, all_integers(0x0f0f0f0f));
    const int shift = 4 - k * (bits - 4);
    if (form == CODED) return look_up(CODES, four);
    if (bits == 4) return four;
    return either(four, both(shift >= 0 ? left(high, shift) : right(high, -shift),
                             all_integers(bits == 5 ? 0x10101010 : 0x30303030)));
}

INLINE void finish(Floats sum, const float *bias, float *y, int64_t width) {
    float kept[V];
    if (width >= V) {
        store(y, bias ? plus(sum, load(bias)) : sum);
        return;
    }
    store(kept, sum);
    for (int64_t o = 0; o < width; o++) y[o] = kept[o] + (bias ? bias[o] : 0);
}

INLINE void tile(const char *panel, int64_t size, Input in, const float *bias, float *y, int64_t step, int64_t width,
                 const int M, const int N, const int bits, const int form) {
    const int G = bits == 6 ? 16 : 32, has_zero = form == ZERO || form == ZERO_UPPER;
    const int has_minimum = form == MINIMUM || form == SUPER_MINIMUM || has_zero;
    const int64_t row = in.groups * in.parts, ahead = ahead_of(MOST_PANELS * size);
    Floats sum[12];
    EACH(n, M * N) sum[n] = all(0);
    const char *header = panel;
    int64_t left_in_block = 0;
    for (int64_t g = 0; g < in.groups; g++) {
        if (form >= ZERO && left_in_block-- == 0) {
            header = panel, panel += block_header(form);
            left_in_block = in.in_block - 1;
        }
        const char *low = panel + group_header(form);
        EACH(n, N) FETCH(low + n * size + ahead, group_header(form) + G * bits / 8 * V);
        Floats scale[4];
        EACH(n, N) {
            const uint16_t *from = (const uint16_t *)((form >= ZERO ? header : panel) + n * size);
            scale[n] = form == CODED        ? load_powers(panel + n * size)
                       : form == ZERO_UPPER ? load_scales(from)
                                            : load_halves(from);
            if (form >= SUPER) scale[n] = times(scale[n], load_small(panel + n * size));
        }
        for (int64_t part = 0; part < in.parts; part++) {
            Integers whole[12], w[4];
            int64_t at = g * in.parts + part;
            EACH(n, M * N) whole[n] = all_integers(has_minimum ? 0 : in.starts[n / N * row + at]);
            EACH(k, G / 4) {
                EACH(n, N) {
                    const char *from = low + n * size;
                    Integers high = bits == 5 || bits == 6 ? load_bytes(from + G / 8 * V * 4) : all_integers(0);
                    w[n] = element(from, high, k, bits, form);
                }
                EACH(m, M) {
                    int32_t four;
                    memcpy(&four, in.bytes + (m * row + at) * G + k * 4, sizeof four);
                    Integers x = all_integers(four);
                    EACH(n, N) {
                        Integers *to = whole + m * N + n;
                        *to = bits == 8 ? dot_bytes(*to, w[n], x) : dot(*to, w[n], x);
                    }
                }
            }
            EACH(m, M) EACH(n, N)
                sum[m * N + n] = fused(float_of(whole[m * N + n]), times(scale[n], all(in.scales[m * row + at])),
                                       sum[m * N + n]);
        }
        if (has_minimum)
            EACH(n, N) {
                const char *from = (form >= ZERO ? header : panel) + n * size + 2 * V;
                Floats least = has_zero ? times(scale[n], load_small(from)) : load_halves((const uint16_t *)from);
                if (form == SUPER_MINIMUM) least = times(least, load_small(panel + n * size + V));
                EACH(m, M) sum[m * N + n] = fused(least, all(in.sums[m * in.groups + g]), sum[m * N + n]);
            }
        panel = low + G * bits / 8 * V;
    }
    EACH(m, M) EACH(n, N) finish(sum[m * N + n], bias ? bias + n * V : 0, y + m * step + n * V, width - n * V);
}

#define ARGUMENTS \
    const char *panel, int64_t size, Input in, const float *bias, float *y, int64_t step, int64_t width
typedef void (*Tile)(ARGUMENTS);
#define TILE(name, M, bits, form)                                          \
    static void name##_##M(ARGUMENTS) {                                    \
        tile(panel, size, in, bias, y, step, width, M, panels_of(M), bits, form); \
    }
#if REGISTERS == 32
#define TILES_OF(name, bits, form)                                                                                  \
    TILE(name, 1, bits, form) TILE(name, 2, bits, form) TILE(name, 3, bits, form) TILE(name, 4, bits, form)         \
    TILE(name, 5, bits, form) TILE(name, 6, bits, form) TILE(name, 7, bits, form) TILE(name, 8, bits, form)         \
    const Tile name[] = {0, name##_1, name##_2, name##_3, name##_4, name##_5, name##_6, name##_7, name##_8};
#else
#define TILES_OF(name, bits, form)                                                                                  \
    TILE(name, 1, bits, form) TILE(name, 2, bits, form) TILE(name, 3, bits, form) TILE(name, 4, bits, form)         \
    const Tile name[] = {0, name##_1, name##_2, name##_3, name##_4};
#endif
#if HAS(1)
TILES_OF(plain4, 4, PLAIN)
#endif
#if HAS(2)
TILES_OF(minimum4, 4, MINIMUM)
#endif
#if HAS(3)
TILES_OF(plain5, 5, PLAIN)
#endif
#if HAS(4)
TILES_OF(minimum5, 5, MINIMUM)
#endif
#if HAS(5)
TILES_OF(plain8, 8, PLAIN)
#endif
#if HAS(6)
TILES_OF(super_minimum4, 4, SUPER_MINIMUM)
#endif
#if HAS(7)
TILES_OF(super_minimum5, 5, SUPER_MINIMUM)
#endif
#if HAS(8)
TILES_OF(super6, 6, SUPER)
#endif
#if HAS(9)
TILES_OF(coded4, 4, CODED)
#endif
#if HAS(10)
TILES_OF(zero4, 4, ZERO)
#endif
#if HAS(11)
TILES_OF(zero_upper4, 4, ZERO_UPPER)
#endif

#if HAS(0)
#ifdef UNIT
static const Tile *TILES[KINDS];
#else
static const Tile *TILES[KINDS] = {
    [PLAIN4] = plain4, [MINIMUM4] = minimum4, [PLAIN5] = plain5, [MINIMUM5] = minimum5, [PLAIN8] = plain8,
    [SUPER_MINIMUM4] = super_minimum4, [SUPER_MINIMUM5] = super_minimum5, [SUPER6] = super6,
    [CODED4] = coded4, [ZERO4] = zero4, [ZERO_UPPER4] = zero_upper4,
};
#endif

/* Products of formats of this kind use these tiles from now on. */
void give_block_tiles(int64_t kind, const Tile *tiles) { TILES[kind] = tiles; }

/* Rounded rows, one block of memory. */
typedef struct {
    int64_t groups, parts;
    float *scales, *sums;
    int32_t *starts;
    int8_t *bytes;
} Rounded;

/* Cuts memory for T rows into arrays.  Returns its size; block: 0 to compute only that. */
static int64_t cut(char *block, const Format *is, int64_t parts, int64_t T, int64_t I, Rounded *to) {
    int64_t groups = I / is->group, digits = T * groups * parts;
    to->groups = groups, to->parts = parts;
    to->scales = (float *)block;
    to->starts = (int32_t *)(to->scales + digits);
    to->sums = (float *)(to->starts + digits);
    to->bytes = (int8_t *)(to->sums + T * groups);
    return digits * 8 + T * groups * 4 + T * I * parts;
}

/* Rounds row t; NaN or infinity gives scales that make its outputs NaN.  Digits of products that might exceed 16 bits
   have 7 bits. */
OF_VECTORS static void round_row(const Format *is, const float *x, int64_t t, const Rounded *to) {
    const int G = is->group, bits = WIDE_SUMS || is->bits < 8 ? 8 : 7, parts = to->parts;
    const int32_t half = 1 << (bits - 1);
    const int32_t largest = (half - 1) << bits * (parts - 1); /* below what fits, as a product may be rounded up */
    for (int64_t g = 0; g < to->groups; g++, x += G) {
        int64_t at = (t * to->groups + g) * parts;
        uint32_t magnitudes[MOST_GROUP], highest = 0;
        int32_t whole[MOST_GROUP], sum = 0;
        float most;
        memcpy(magnitudes, x, G * sizeof *x);
        for (int i = 0; i < G; i++) {
            uint32_t magnitude = magnitudes[i] & 0x7fffffff;
            highest = magnitude > highest ? magnitude : highest;
        }
        memcpy(&most, &highest, sizeof most);
        int finite = highest < 0x7f800000;
        float inverse = finite && most > 1e-30f ? largest / most : 0, unit = finite ? most / largest : NAN;
        for (int i = 0; i < G; i++) whole[i] = inverse ? (int32_t)rintf(x[i] * inverse) : 0, sum += whole[i];
        to->sums[t * to->groups + g] = sum * unit;
        for (int part = 0; part < parts; part++) {
            int8_t *bytes = to->bytes + (at + part) * G;
            int32_t digits = 0;
            for (int i = 0; i < G; i++) {
                int32_t digit = part + 1 < parts ? ((whole[i] + half) & (2 * half - 1)) - half : whole[i];
                whole[i] = (whole[i] - digit) >> bits;
                bytes[i] = digit;
                digits += digit;
            }
            to->scales[at + part] = unit;
            to->starts[at + part] = -digits * (int32_t)is->zero;
            unit *= 2 * half;
        }
    }
}

static Input rows_from(const Format *is, const Rounded *in, int64_t t) {
    int64_t at = t * in->groups * in->parts;
    return (Input){in->bytes + at * is->group, in->scales + at, in->sums + t * in->groups, in->starts + at,
                   in->groups, is->size / is->group, in->parts};
}

/* A product with one part of a weight, O being the outputs of all of it, and the tiles block:last that threads compute. */
typedef struct {
    const Blocks *blocks;
    const Format *format;
    const Rounded *rounded;
    const float *x_TI, *bias;
    float *y;
    int64_t x_step, O, I, T, tiles, block, last;
} Product;

static void round_of(const void *of, int64_t t, int64_t thread) {
    const Product *is = of;
    round_row(is->format, is->x_TI + t * is->x_step, t, is->rounded);
}

static void multiply_of(const void *of, int64_t item, int64_t thread) {
    const Product *is = of;
    const Blocks *blocks = is->blocks;
    const Tile *of_kind = TILES[is->format->kind];
    int64_t count = (blocks->O + V - 1) / V, size = is->I / is->format->size * block_bytes(is->format);
    int64_t p = item * MOST_PANELS, T = is->T;
    for (int64_t b = is->block; b < is->last; b++) {
        int64_t first = b * T / is->tiles, rows = (b + 1) * T / is->tiles - first;
        for (int64_t q = p; q < p + MOST_PANELS && q < count; q += panels_of(rows))
            of_kind[rows](blocks->panels + q * size, size, rows_from(is->format, is->rounded, first),
                          is->bias ? is->bias + q * V : 0, is->y + first * is->O + q * V, is->O, blocks->O - q * V);
    }
}

/* Computes the outputs of one part of a weight; O: outputs of the weight.  Returns -1 if memory is lacking. */
static int64_t blocks_part(const Blocks *blocks, int64_t I, const float *x_TI, int64_t x_step, const float *bias,
                           float *y, int64_t O, int64_t T, int64_t threads) {
    const Format *format = TABLE + blocks->format;
    int64_t items = ((blocks->O + V - 1) / V + MOST_PANELS - 1) / MOST_PANELS;
    threads = worth(threads, T * blocks->O * I / AT_ONCE);
    Rounded in;
    char *memory = malloc(cut(0, format, blocks->parts, T, I, &in) + 1);
    if (!memory) return -1;
    cut(memory, format, blocks->parts, T, I, &in);
    /* As in products.c: rows form tiles of two sizes that differ by one, and tiles form blocks that fit a cache. */
    int64_t tiles = (T + MOST_ROWS - 1) / MOST_ROWS;
    int64_t in_block = ROW_BLOCK_BYTES / (I * blocks->parts * MOST_ROWS) + 1;
    Product is = {blocks, format, &in, x_TI, bias, y, x_step, O, I, T, tiles, 0, 0};
    share(threads, T, round_of, &is);
    for (; is.block < tiles; is.block = is.last) {
        is.last = is.block + in_block < tiles ? is.block + in_block : tiles;
        share(threads, items, multiply_of, &is);
    }
    free(memory);
    return 0;
}

/* weight->panels: ``kind`` times Blocks.  The rest is as in ``product``. */
int64_t blocks_product(const Weight *weight, const float *x_TI, int64_t x_step, const float *bias_O, float *y_TO,
                       int64_t T, int64_t threads) {
    const Blocks *blocks = weight->panels;
    int64_t failed = 0, first = 0;
    for (int64_t n = 0; n < weight->kind && !failed; first += blocks[n++].O)
        failed = blocks_part(blocks + n, weight->I, x_TI, x_step, bias_O ? bias_O + first : 0, y_TO + first, weight->O,
                             T, threads);
    return failed;
}
#endif
#endif
