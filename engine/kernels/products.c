/* Products y[T,O] = x[T,I] W[O,I]^T + bias of float32 rows.  engine/kernels/panels.py calls them.

   A weight lies in panels of P outputs, as floats, halves or bytes.  An output is one sum over the inputs in their
   order, so a row has the same bits whatever other rows, tiles and threads there are.

   Legend: T rows, I inputs, O outputs, V numbers of a vector, P outputs of a panel, G inputs that share a scale,
   M rows and N panels of a tile. */

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cpu.h"
#include "vectors.h"
#include "tiles.h"

/* UPPER_HALVES: bfloat16, the upper halves of floats.  PAIRS: the same of inputs 2i and 2i + 1, whose products are added
   at once; the input is rounded to bfloat16, too.  FINE_BYTES: as BYTES, with twice the bits of the input. */
enum { FLOATS, HALVES, UPPER_HALVES, PAIRS, BYTES, FINE_BYTES };

#define G 64

/* A compiler takes most of its time for the tiles.  UNIT 1 and above have those of one kind each, and UNIT 0 has the
   rest, to which a process gives the tiles that its weights need; without UNIT this is all of it. */
#ifdef UNIT
#define HAS(unit) (UNIT == (unit))
#else
#define HAS(unit) 1
#endif

#ifndef V
#if HAS(0)
int64_t panel_width(void) { return 0; }
int64_t pair_products(void) { return 0; }
#endif
#else

/* Bits of an input byte: a sum of two products of 8 bits exceeds 16. */
#define BITS (WIDE_SUMS ? 8 : 7)
#define panels_of(M) (REGISTERS == 16 ? (M) == 1 ? 4 : (M) == 2 ? 2 : 1 : (M) <= 2 ? 4 : (M) <= 5 ? 2 : 1)
#define MOST_ROWS (REGISTERS == 16 ? 6 : 12)
#define byte_panels_of(M) (REGISTERS == 16 ? 1 : (M) == 1 ? 4 : (M) == 2 ? 2 : 1)
#define MOST_BYTE_ROWS (REGISTERS == 16 ? 3 : 6)

#define P (2 * V)
/* A group of a panel of bytes: P scales, each the upper half of a float; P sums of bytes; the bytes, by fours. */
#define MOST_PANELS 4
#define GROUP_BYTES (P * (2 + 2 + G))
#define ROW_BLOCK_BYTES (384 << 10)
/* Steps of the sums of many rows at once, whose part of a panel and of a tile stays near a core.  Few rows keep
   whole sums. */
#define STEP_BLOCK 384
#define ROWS_FOR_STEP_BLOCKS (4 * MOST_ROWS)
#define AT_ONCE 4 /* multiplications that take as long as a number of other loops */

/* Number of bytes of an input element, and the integer that represents 0. */
static int64_t parts_of(int64_t kind) { return kind == FINE_BYTES ? 2 : 1; }
static int32_t zero_of(int64_t parts) { return 1 << (BITS * parts - 1); }

static int64_t groups(int64_t I) { return (I + G - 1) / G; }

#if HAS(0)
int64_t panel_width(void) { return P; }
int64_t pair_products(void) { return PAIR_PRODUCTS; }
#endif

/* Steps of a tile's sum. */
INLINE int64_t steps_of(int64_t kind, int64_t I) { return kind == PAIRS ? (I + 1) / 2 : I; }

#if HAS(0)
static int64_t panel_bytes(const Weight *weight) {
    if (weight->kind >= BYTES) return groups(weight->I) * GROUP_BYTES;
    return steps_of(weight->kind, weight->I) * P * (weight->kind == FLOATS || weight->kind == PAIRS ? 4 : 2);
}

/* Tiles have up to MOST_PANELS panels, so the number of panels is a multiple of that. */
static int64_t panels_in(const Weight *weight) {
    return (weight->O + MOST_PANELS * P - 1) / (MOST_PANELS * P) * MOST_PANELS;
}

int64_t packed_bytes(const Weight *weight) { return panels_in(weight) * panel_bytes(weight); }

/* Returns the bits of a group's largest magnitude and copies its ``size`` numbers to ``numbers``, padded with 0. */
OF_VECTORS static uint32_t highest_of(const float *x, int64_t size, float *numbers) {
    uint32_t bits[G] = {0}, highest = 0;
    memcpy(bits, x, size * sizeof *bits);
    memcpy(numbers, bits, sizeof bits);
    for (int i = 0; i < G; i++) {
        uint32_t magnitude = bits[i] & 0x7fffffff;
        highest = magnitude > highest ? magnitude : highest;
    }
    return highest;
}

OF_VECTORS static void pack_bytes(const float *w_OI, char *panel, int64_t first, int64_t O, int64_t I) {
    for (int64_t g = 0; g < groups(I); g++, panel += GROUP_BYTES) {
        uint16_t *scales = (uint16_t *)panel;
        int16_t *sums = (int16_t *)(panel + 2 * P);
        char *bytes = panel + 4 * P;
        for (int64_t o = 0; o < P; o++) {
            float numbers[G], scale;
            int64_t size = first + o >= O ? 0 : I - g * G < G ? I - g * G : G;
            uint32_t bits = highest_of(size ? w_OI + (first + o) * I + g * G : w_OI, size, numbers);
            memcpy(&scale, &bits, sizeof scale);
            scale = bits > 0x7f800000 ? NAN : scale / 127; /* a NaN weight makes its outputs NaN, as in float32 */
            memcpy(&bits, &scale, sizeof bits);
            bits = (bits + 0xffff) & 0xffff0000; /* up, so that the largest still fits */
            memcpy(&scale, &bits, sizeof scale);
            scales[o] = bits >> 16;
            float inverse = scale >= FLT_MIN ? 1 / scale : 0; /* of a smaller scale it would be infinite; NaN gives 0 */
            int8_t whole[G];
            int32_t sum = 0;
            for (int i = 0; i < G; i++) {
                int32_t byte = inverse ? (int32_t)rintf(numbers[i] * inverse) : 0;
                whole[i] = byte;
                sum += byte;
            }
            sums[o] = sum;
            for (int i = 0; i < G; i += 4) memcpy(bytes + i * P + o * 4, whole + i, 4);
        }
    }
}

/* panels: ``packed_bytes`` of memory, which this fills. */
void pack(const Weight *weight, const float *w_OI, char *panels, int64_t threads) {
    int64_t O = weight->O, I = weight->I, count = panels_in(weight), size = panel_bytes(weight);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t p = 0; p < count; p++) {
        char *panel = panels + p * size;
        if (weight->kind >= BYTES) {
            pack_bytes(w_OI, panel, p * P, O, I);
            continue;
        }
        if (weight->kind == PAIRS) memset(panel, 0, size); /* the last pair may lack one */
        for (int64_t o = 0; o < P; o++)
            for (int64_t i = 0; i < I; i++) {
                float w = p * P + o < O ? w_OI[(p * P + o) * I + i] : 0;
                if (weight->kind == HALVES)
                    ((uint16_t *)panel)[i * P + o] = half_of(w);
                else if (weight->kind == UPPER_HALVES) /* outputs o and o + V are neighbours */
                    ((uint16_t *)panel)[i * P + o % V * 2 + o / V] = upper_half_of(w);
                else if (weight->kind == PAIRS)
                    ((uint16_t *)panel)[i / 2 * P * 2 + o * 2 + i % 2] = upper_half_of(w);
                else
                    ((float *)panel)[i * P + o] = w;
            }
    }
}

#endif

/* The rows of a tile: x[steps,M] from a step on; pairs in their place; or scales[M,I/G] and bytes[M,I/G,parts,G], with
   the upper part first.  Sums of a step's block go on with those in y, in the same order as without blocks. */
typedef struct {
    int64_t step, steps;
    const float *x;
    const float *scales;
    const uint8_t *bytes;
} Input;

/* Writes one panel of sums to y; the last panel may be cut. */
INLINE void finish(const Floats *sum, const float *bias, float *y, int64_t width) {
    float kept[P];
    EACH(v, 2) {
        if (width >= P)
            store(y + v * V, bias ? plus(sum[v], load(bias + v * V)) : sum[v]);
        else
            store(kept + v * V, sum[v]);
    }
    if (width < P)
        for (int64_t o = 0; o < width; o++) y[o] = kept[o] + (bias ? bias[o] : 0);
}

/* Reads one panel of sums that ``finish`` wrote. */
INLINE void resume(Floats *sum, const float *y, int64_t width) {
    float kept[P] = {0};
    if (width < P) {
        for (int64_t o = 0; o < width; o++) kept[o] = y[o];
        y = kept;
    }
    EACH(v, 2) sum[v] = load(y + v * V);
}

INLINE void tile(const Weight *is, const char *panel, int64_t size, Input in, const float *bias, float *y,
                 int64_t width, const int M, const int N, const int kind) {
    Floats sum[24], w[8];
    EACH(n, M * N * 2) sum[n] = all(0);
    if (in.step) EACH(m, M) EACH(n, N) resume(sum + (m * N + n) * 2, y + m * is->O + n * P, width - n * P);
    panel += in.step * P * (kind == FLOATS || kind == PAIRS ? 4 : 2);
    if (M == MOST_ROWS) EACH(m, M) EACH(n, 2 * N) __builtin_prefetch(y + (m + M) * is->O + n * V, 1, 2);
    for (int64_t i = 0; i < in.steps; i++) {
        EACH(n, N * 2) {
            int64_t at = i * P + n % 2 * V;
            const char *from = panel + n / 2 * size;
            if (kind == UPPER_HALVES) {
                Integers pair = load_bytes(from + i * P * 2);
                w[n] = n % 2 ? upper_float(pair) : lower_float(pair);
            } else
                w[n] = kind == HALVES ? load_halves((const uint16_t *)from + at) : load((const float *)from + at);
        }
        EACH(m, M) {
            Floats x = all(in.x[i * M + m]);
            EACH(n, N * 2) {
                Floats *to = sum + m * N * 2 + n;
                *to = kind == PAIRS ? dot_pairs(*to, x, w[n]) : fused(x, w[n], *to);
            }
        }
    }
    EACH(m, M) EACH(n, N)
        finish(sum + (m * N + n) * 2, bias ? bias + n * P : 0, y + m * is->O + n * P, width - n * P);
}

INLINE void byte_tile(const Weight *is, const char *panel, int64_t size, Input in, const float *bias, float *y,
                      int64_t width, const int M, const int N) {
    Floats sum[24];
    int64_t count = groups(is->I), parts = parts_of(is->kind);
    Integers zero = all_integers(-zero_of(parts)), next = all_integers(1 << BITS);
    EACH(n, M * N * 2) sum[n] = all(0);
    for (int64_t g = 0; g < count; g++) {
        const char *group = panel + g * GROUP_BYTES;
        Integers whole[24], w[8];
        EACH(n, M * N * 2) whole[n] = all_integers(0);
        for (int64_t part = 0; part < parts; part++) {
            if (part) EACH(n, M * N * 2) whole[n] = times_integers(whole[n], next);
            for (int i = 0; i < G; i += 4) {
                EACH(n, N * 2) w[n] = load_bytes(group + n / 2 * size + 4 * P + i * P + n % 2 * V * 4);
                EACH(m, M) {
                    int32_t four;
                    memcpy(&four, in.bytes + ((m * count + g) * parts + part) * G + i, sizeof four);
                    Integers x = all_integers(four);
                    EACH(n, N * 2) whole[m * N * 2 + n] = dot(whole[m * N * 2 + n], x, w[n]);
                }
            }
        }
        EACH(n, N * 2) {
            Floats scale = load_scales(group + n / 2 * size + n % 2 * V * 2);
            Integers extra = times_integers(zero, load_sums(group + n / 2 * size + 2 * P + n % 2 * V * 2));
            EACH(m, M) {
                Floats of_row = times(scale, all(in.scales[m * count + g]));
                Floats exact = float_of(plus_integers(whole[m * N * 2 + n], extra));
                sum[m * N * 2 + n] = fused(exact, of_row, sum[m * N * 2 + n]);
            }
        }
    }
    EACH(m, M) EACH(n, N)
        finish(sum + (m * N + n) * 2, bias ? bias + n * P : 0, y + m * is->O + n * P, width - n * P);
}

#if TILE_ROWS && HAS(0)
/* As byte_tile, with M up to TILE_ROWS and one panel.  Sums of integers are exact, so the bits are the same. */
static void wide_byte_tile(const Weight *is, const char *panel, Input in, const float *bias, float *y, int64_t width,
                           int64_t M) {
    int64_t count = groups(is->I), parts = parts_of(is->kind);
    Integers zero = all_integers(-zero_of(parts)), next = all_integers(1 << BITS);
    Floats sum[TILE_ROWS][2];
    for (int64_t m = 0; m < M; m++) sum[m][0] = sum[m][1] = all(0);
    begin_tiles(M);
    for (int64_t g = 0; g < count; g++, panel += GROUP_BYTES)
        EACH(v, 2) {
            Integers whole[TILE_ROWS];
            for (int64_t part = 0; part < parts; part++) {
                int32_t sums[TILE_ROWS * V];
                tile_sums(in.bytes + (g * parts + part) * G, count * parts * G, panel + 4 * P + v * V * 4, P * 4, sums);
                for (int64_t m = 0; m < M; m++) {
                    Integers of_part = load_bytes(sums + m * V);
                    whole[m] = part ? plus_integers(times_integers(whole[m], next), of_part) : of_part;
                }
            }
            Floats scale = load_scales(panel + v * V * 2);
            Integers extra = times_integers(zero, load_sums(panel + 2 * P + v * V * 2));
            for (int64_t m = 0; m < M; m++) {
                Floats of_row = times(scale, all(in.scales[m * count + g]));
                sum[m][v] = fused(float_of(plus_integers(whole[m], extra)), of_row, sum[m][v]);
            }
        }
    end_tiles();
    for (int64_t m = 0; m < M; m++) finish(sum[m], bias, y + m * is->O, width);
}
#endif

#define ARGUMENTS                                                                                             \
    const Weight *is, const char *panel, int64_t size, Input in, const float *bias, float *y, int64_t width
typedef void (*Tile)(ARGUMENTS);
#define TILE(name, M, kind) \
    static void name##_##M(ARGUMENTS) { tile(is, panel, size, in, bias, y, width, M, panels_of(M), kind); }
#define BYTE_TILE(M) \
    static void byte_##M(ARGUMENTS) { byte_tile(is, panel, size, in, bias, y, width, M, byte_panels_of(M)); }
#if REGISTERS == 32
#define TILES_OF(name, kind)                                                                                        \
    TILE(name, 1, kind) TILE(name, 2, kind) TILE(name, 3, kind) TILE(name, 4, kind) TILE(name, 5, kind)             \
    TILE(name, 6, kind) TILE(name, 7, kind) TILE(name, 8, kind) TILE(name, 9, kind) TILE(name, 10, kind)            \
    TILE(name, 11, kind) TILE(name, 12, kind)                                                                       \
    const Tile name##_tiles[] = {0, name##_1, name##_2, name##_3, name##_4, name##_5, name##_6, name##_7, name##_8, \
                                 name##_9, name##_10, name##_11, name##_12};
#else
#define TILES_OF(name, kind)                                                                            \
    TILE(name, 1, kind) TILE(name, 2, kind) TILE(name, 3, kind) TILE(name, 4, kind) TILE(name, 5, kind) \
    TILE(name, 6, kind)                                                                                 \
    const Tile name##_tiles[] = {0, name##_1, name##_2, name##_3, name##_4, name##_5, name##_6};
#endif
#if HAS(0)
TILES_OF(float, FLOATS)
#endif
#if HAS(1)
TILES_OF(half, HALVES)
#endif
#if HAS(2)
TILES_OF(upper, UPPER_HALVES)
#endif
#if HAS(3)
TILES_OF(pair, PAIRS)
#endif
#if HAS(4)
BYTE_TILE(1) BYTE_TILE(2) BYTE_TILE(3)
#if REGISTERS == 32
BYTE_TILE(4) BYTE_TILE(5) BYTE_TILE(6)
const Tile byte_tiles[] = {0, byte_1, byte_2, byte_3, byte_4, byte_5, byte_6};
#else
const Tile byte_tiles[] = {0, byte_1, byte_2, byte_3};
#endif
#endif

#if HAS(0)
#ifdef UNIT
static const Tile *TILES[BYTES + 1] = {float_tiles};
#else
static const Tile *TILES[BYTES + 1] = {float_tiles, half_tiles, upper_tiles, pair_tiles, byte_tiles};
#endif

/* Products of this kind use these tiles from now on.  FINE_BYTES: those of BYTES. */
void give_tiles(int64_t kind, const Tile *tiles) { TILES[kind] = tiles; }

/* Rounds a row to bytes with a scale per group; NaN or infinity gives scales that make the outputs NaN. */
OF_VECTORS static void round_row(const float *x, int64_t I, int64_t parts, float *scales, uint8_t *bytes) {
    int32_t zero = zero_of(parts);
    for (int64_t g = 0; g < groups(I); g++) {
        uint8_t *restrict to = bytes + g * parts * G;
        float largest, numbers[G];
        uint32_t highest = highest_of(x + g * G, I - g * G < G ? I - g * G : G, numbers);
        memcpy(&largest, &highest, sizeof largest);
        int finite = highest < 0x7f800000;
        float inverse = finite && largest > 1e-30f ? (zero - 1) / largest : 0;
        scales[g] = finite ? largest / (zero - 1) : NAN;
        for (int i = 0; i < G; i++) {
            int32_t whole = (inverse ? (int32_t)rintf(numbers[i] * inverse) : 0) + zero;
            to[(parts - 1) * G + i] = whole & ((1 << BITS) - 1);
            if (parts > 1) to[i] = whole >> BITS;
        }
    }
}

static void transpose(const float *x_MI, int64_t x_step, float *restrict out_IM, int64_t M, int64_t I) {
    for (int64_t m = 0; m < M; m++)
        for (int64_t i = 0; i < I; i++) out_IM[i * M + m] = x_MI[m * x_step + i];
}

/* out[I/2,M]: two numbers of a row in each float. */
static void transpose_pairs(const float *x_MI, int64_t x_step, float *restrict out, int64_t M, int64_t I) {
    for (int64_t m = 0; m < M; m++)
        for (int64_t i = 0; i < I; i += 2) {
            const float *x = x_MI + m * x_step + i;
            uint32_t pair = upper_half_of(x[0]) | (i + 1 < I ? (uint32_t)upper_half_of(x[1]) << 16 : 0);
            memcpy(out + i / 2 * M + m, &pair, sizeof pair);
        }
}

/* A product, and what threads compute of it at the time: tiles block:last, steps at:at + now of their sums.
   block_x: those rows by steps.  rounded, scales: all rows, if the weight is bytes.  step: panels at once. */
typedef struct {
    const Weight *weight;
    const float *x_TI, *bias_O;
    float *y_TO, *block_x, *scales;
    char *rounded;
    int64_t T, x_step, tiles, padded, step, block, last, at, now, ends;
} Product;

static void round_of(const void *of, int64_t t, int64_t thread) {
    const Product *is = of;
    int64_t I = is->weight->I;
    round_row(is->x_TI + t * is->x_step, I, parts_of(is->weight->kind), is->scales + t * groups(I),
              (uint8_t *)is->rounded + t * is->padded);
}

static void transpose_of(const void *of, int64_t item, int64_t thread) {
    const Product *is = of;
    int64_t pairs = is->weight->kind == PAIRS, T = is->T, b = is->block + item, start = is->block * T / is->tiles;
    int64_t first = b * T / is->tiles, end = (b + 1) * T / is->tiles;
    int64_t input = pairs ? 2 * is->at : is->at, inputs = is->ends ? is->weight->I - input : pairs ? 2 * is->now : is->now;
    (pairs ? transpose_pairs : transpose)(is->x_TI + first * is->x_step + input, is->x_step,
                                          is->block_x + (first - start) * is->now, end - first, inputs);
}

static void multiply_of(const void *of, int64_t item, int64_t thread) {
    const Product *is = of;
    const Weight *weight = is->weight;
    int bytes = weight->kind >= BYTES;
    int64_t p = item * is->step, size = panel_bytes(weight), T = is->T, O = weight->O, start = is->block * T / is->tiles;
    const char *panel = (const char *)weight->panels + p * size;
    const float *bias = is->bias_O && is->ends ? is->bias_O + p * P : 0;
    for (int64_t b = is->block; b < is->last; b++) {
        int64_t first = b * T / is->tiles, rows = (b + 1) * T / is->tiles - first;
        Input in = {is->at, is->now, is->block_x + (bytes ? 0 : (first - start) * is->now),
                    is->scales + first * groups(weight->I), (uint8_t *)is->rounded + first * is->padded};
        float *y = is->y_TO + first * O + p * P;
#if TILE_ROWS
        if (bytes && rows > MOST_BYTE_ROWS) {
            wide_byte_tile(weight, panel, in, bias, y, O - p * P, rows);
            continue;
        }
#endif
        TILES[bytes ? BYTES : weight->kind][rows](weight, panel, size, in, bias, y, O - p * P);
    }
}

/* A Weight's ``product``.  x_step: distance of two rows.  bias_O: NULL for none.  threads: at most.  Returns 0, or -1 if memory is lacking. */
int64_t product(const Weight *weight, const float *x_TI, int64_t x_step, const float *bias_O, float *y_TO, int64_t T,
                int64_t threads) {
    int64_t O = weight->O, I = weight->I, padded = groups(I) * G * parts_of(weight->kind);
    int bytes = weight->kind >= BYTES;
    threads = worth(threads, T * O * I / AT_ONCE);
    /* Rows form tiles of two sizes that differ by one; the larger size sets the number of panels at once.  Tiles form
       blocks that fit a core's cache together with those panels. */
    int64_t most = bytes ? MOST_BYTE_ROWS : MOST_ROWS;
    if (bytes && TILE_ROWS && T > most && tiles_allowed()) most = TILE_ROWS;
    int64_t tiles = (T + most - 1) / most;
    int64_t rows = tiles ? (T - 1) / tiles + 1 : 0;
    int64_t steps = steps_of(weight->kind, I);
    int64_t at_once = !bytes && T > ROWS_FOR_STEP_BLOCKS && steps > STEP_BLOCK ? STEP_BLOCK : steps;
    int64_t row_bytes = bytes ? padded : at_once * (int64_t)sizeof(float);
    int64_t in_block = row_bytes ? ROW_BLOCK_BYTES / (row_bytes * most) + 1 : tiles;  /* a weight may have no inputs */
    if (in_block > tiles) in_block = tiles;
    char *memory = malloc((bytes ? T * (padded + groups(I) * (int64_t)sizeof(float)) : in_block * rows * row_bytes) + 1);
    if (!memory) return -1;
    Product is = {weight, x_TI, bias_O, y_TO, (float *)memory, (float *)(memory + (bytes ? T * padded : 0)), memory, T,
                  x_step, tiles, padded, bytes ? byte_panels_of(rows) : panels_of(rows), 0, 0, 0, 0, 0};
    int64_t items = ((O + P - 1) / P + is.step - 1) / is.step;
    if (bytes) share(threads, T, round_of, &is);
    for (; is.block < tiles; is.block = is.last) {
        is.last = is.block + in_block < tiles ? is.block + in_block : tiles;
        is.at = is.ends = 0;
        while (!is.ends) { /* a weight without inputs has one part too, which writes the bias */
            is.now = steps - is.at < at_once ? steps - is.at : at_once, is.ends = is.at + is.now == steps;
            if (!bytes) share(worth(threads, T * is.now), is.last - is.block, transpose_of, &is);
            share(threads, items, multiply_of, &is);
            is.at += is.now;
        }
    }
    free(memory);
    return 0;
}
#endif
#endif
