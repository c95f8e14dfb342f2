/* Attention of float32 queries over paged keys and values; decode rows and prompts are computed in the same way.

   A result depends only on the query, its position, and the keys and values that it sees; not on the chunk that it came
   in, other rows of the step, or threads.  A score is four sums over every fourth number of a head, each in the order
   of the head, then (s0 + s2) + (s1 + s3).  Keys are read in blocks from position 0 on; each block brings its highest
   score and its weights, and earlier results are scaled to the new highest score.  Sums of weights are one for each of
   W lanes, in the order of positions; each number of a result is one sum in the order of positions.  So this file must
   be compiled without permission to reorder sums.

   Legend: T tokens, B sequences, P pages of a sequence, Q query heads, G key/value heads, H head size, S slots,
   I items, R rows of a tile, K keys of a block.  A row is a query of one head. */

#include <math.h>
#include <string.h>

#include "cpu.h"
#include "lanes.h"

#if W == 16
#define TOGETHER 6 /* rows whose scores are summed in registers, four vectors each */
#define COLUMNS 4  /* vectors of a result that are summed in registers for each of TILE rows */
#else
#define TOGETHER 3
#define COLUMNS 2
#endif
#define TILE 6
#define LINE 16  /* numbers of a line of a cache */
#define KEYS 128 /* of a block */
#define ROWS 96  /* of an item: they share the packing of a block of keys */

typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));
#if W == 16
INLINE V four_times(const float *x) { return _mm512_broadcast_f32x4(_mm_loadu_ps(x)); }
INLINE V higher(V x, V than) { return _mm512_max_ps(x, than); } /* ``than`` where x is NaN */
/* Lane 4i + j: the sum of lanes 4i to 4i + 3 of x[j]. */
INLINE V sums_of_fours(const V *x) {
    V a = _mm512_unpacklo_ps(x[0], x[1]) + _mm512_unpackhi_ps(x[0], x[1]);
    V b = _mm512_unpacklo_ps(x[2], x[3]) + _mm512_unpackhi_ps(x[2], x[3]);
    return (V)_mm512_shuffle_ps(a, b, 0x44) + (V)_mm512_shuffle_ps(a, b, 0xee);
}
/* Loads the next W numbers of every fourth of W keys: the i-th four of each key go to out[i]. */
INLINE void pack(const float *keys, const int64_t *at, V *out) {
    V a = load(keys + at[0]), b = load(keys + at[4]), c = load(keys + at[8]), d = load(keys + at[12]);
    V even = _mm512_shuffle_f32x4(a, b, 0x88), odd = _mm512_shuffle_f32x4(a, b, 0xdd);
    V even_2 = _mm512_shuffle_f32x4(c, d, 0x88), odd_2 = _mm512_shuffle_f32x4(c, d, 0xdd);
    out[0] = _mm512_shuffle_f32x4(even, even_2, 0x88), out[1] = _mm512_shuffle_f32x4(odd, odd_2, 0x88);
    out[2] = _mm512_shuffle_f32x4(even, even_2, 0xdd), out[3] = _mm512_shuffle_f32x4(odd, odd_2, 0xdd);
}
#elif W == 8
INLINE V four_times(const float *x) { return _mm256_broadcast_ps((const __m128 *)x); }
INLINE V higher(V x, V than) { return _mm256_max_ps(x, than); }
INLINE V sums_of_fours(const V *x) {
    V a = _mm256_unpacklo_ps(x[0], x[1]) + _mm256_unpackhi_ps(x[0], x[1]);
    V b = _mm256_unpacklo_ps(x[2], x[3]) + _mm256_unpackhi_ps(x[2], x[3]);
    return (V)_mm256_shuffle_ps(a, b, 0x44) + (V)_mm256_shuffle_ps(a, b, 0xee);
}
INLINE void pack(const float *keys, const int64_t *at, V *out) {
    V a = load(keys + at[0]), b = load(keys + at[4]);
    out[0] = _mm256_permute2f128_ps(a, b, 0x20), out[1] = _mm256_permute2f128_ps(a, b, 0x31);
}
#else
INLINE V four_times(const float *x) { return load(x); }
INLINE V higher(V x, V than) {
    Bits is = (Bits)(x > than);
    return (V)(((Bits)x & is) | ((Bits)than & ~is));
}
INLINE V sums_of_fours(const V *x) {
    V sum;
    for (int j = 0; j < 4; j++) sum[j] = (x[j][0] + x[j][2]) + (x[j][1] + x[j][3]);
    return sum;
}
INLINE void pack(const float *keys, const int64_t *at, V *out) { out[0] = load(keys + at[0]); }
#endif

/* A thread's memory and its current operands. */
typedef struct {
    V *packed;     /* [K / W][H / 4][4] vectors of fours: lanes 4i to 4i + 3 of the j-th vector are of key 4i + j */
    float *queries, *results; /* of ROWS */
    float *wide_values; /* [K][H rounded up], if H is no multiple of W */
    int64_t wide_at_K[KEYS];
    float *scores; /* [TILE][K] */
    float *weights, *highest; /* of ROWS: sums of W lanes; the highest score */
    int64_t at_K[KEYS];       /* offset of a key and its value in the pool */
    const float *keys;        /* of a group of heads, if they are not packed */
    const float *values;      /* of a group of heads; the k-th is at values_at_K[k] */
    const int64_t *values_at_K;
    const float *coming;      /* NULL, or what is read W keys later: the k-th number of keys or values at coming_at[k] */
    const int64_t *coming_at;
} Scratch;

/* Floats of a thread's memory: whole cache lines. */
int64_t attention_scratch(int64_t H) {
    return whole(H) * (2 * KEYS + 2 * ROWS) + ROWS * (KEYS + W + 1);
}

static Scratch scratch_at(float *at, int64_t H) {
    int64_t wide = whole(H);
    Scratch is;
    is.packed = (V *)at, at += KEYS * wide;
    is.queries = at, at += ROWS * wide;
    is.results = at, at += ROWS * wide;
    is.wide_values = at, at += KEYS * wide;
    is.scores = at, at += ROWS * KEYS;
    is.weights = at, at += ROWS * W;
    is.highest = at;
    is.coming = NULL;
    return is;
}

/* Finds the offsets in the pool of a block's keys from:to.  Keys of the same vectors outside of it repeat an end. */
static void find(const Attention *is, Scratch *in, const int32_t *pages_P, int64_t block, int64_t from, int64_t to) {
    int64_t size = is->page_size, D = is->G * is->H, last;
    for (int64_t l = block + from; l < block + to; l = last) {
        int64_t at = (pages_P[l / size] * is->page_stride + l % size) * D;
        last = l - l % size + size < block + to ? l - l % size + size : block + to;
        for (; l < last; l++, at += D) in->at_K[l - block] = at;
    }
    for (int64_t k = from / W * W; k < from; k++) in->at_K[k] = in->at_K[from];
    for (int64_t k = to; k < whole(to); k++) in->at_K[k] = in->at_K[to - 1];
}

/* Fetches what is read W keys later, a line for each one read now: a CPU does not foresee the places of pages, and in one
   go it would wait for all of them. */
INLINE void foresee(const Scratch *in, int64_t k, int64_t number) {
    if (in->coming && number % LINE < W) __builtin_prefetch(in->coming + in->coming_at[k] + number);
}

static void pack_keys(const Scratch *in, const float *keys, int64_t H, int64_t from, int64_t to) {
    int64_t wide = whole(H), even = H / W * W;
    for (int64_t strip = from / W; strip * W < to; strip++) {
        V *out = in->packed + strip * wide;
        const int64_t *at = in->at_K + strip * W;
        for (int j = 0; j < 4; j++)
            for (int64_t h = 0; h < even; h += W) {
                V packed[W / 4];
                pack(keys + h, at + j, packed);
                for (int i = 0; i < W / 4; i++) foresee(in, 4 * i + j, h);
                for (int i = 0; i < W / 4; i++) out[h + 4 * i + j] = packed[i];
            }
        if (even < H)
            for (int k = 0; k < W; k++)
                for (int64_t h = even; h < wide; h++)
                    ((float *)(out + h / 4 * 4 + k % 4))[k / 4 * 4 + h % 4] = h < H ? keys[at[k] + h] : 0;
    }
}

/* Copies values, padded to whole vectors. */
static void widen(Scratch *in, int64_t H, int64_t from, int64_t to) {
    int64_t wide = whole(H);
    for (int64_t k = from; k < to; k++) {
        in->wide_at_K[k] = k * wide;
        for (int64_t h = 0; h < wide; h++)
            in->wide_values[k * wide + h] = h < H ? in->values[in->at_K[k] + h] : 0;
    }
    in->values = in->wide_values, in->values_at_K = in->wide_at_K;
}

/* Computes the scores of one or two rows without packing the keys, as so few do not repay it; the bits are the same. */
INLINE void score_unpacked(const int rows, const Scratch *in, const float *q, int64_t wide, float *scores,
                           int64_t from, int64_t to) {
    for (int64_t strip = from / W; strip * W < to; strip++) {
        V sum[2][4];
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < 4; j++) sum[r][j] = all(0);
        for (int64_t h = 0; h < wide; h += W) {
            V fours[2][W / 4], packed[W / 4];
            for (int r = 0; r < rows; r++)
                for (int i = 0; i < W / 4; i++) fours[r][i] = four_times(q + r * wide + h + 4 * i);
            for (int j = 0; j < 4; j++) {
                pack(in->keys + h, in->at_K + strip * W + j, packed);
                for (int i = 0; i < W / 4; i++) foresee(in, 4 * i + j, h);
                for (int i = 0; i < W / 4; i++)
                    for (int r = 0; r < rows; r++) sum[r][j] += fours[r][i] * packed[i];
            }
        }
        for (int r = 0; r < rows; r++) store(scores + r * KEYS + strip * W, sums_of_fours(sum[r]));
    }
}

INLINE void score(const int rows, const Scratch *in, const float *q, int64_t wide, float *scores, int64_t from,
                  int64_t to) {
    for (int64_t strip = from / W; strip * W < to; strip++) {
        V sum[TOGETHER][4];
        const V *keys = in->packed + strip * wide;
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < 4; j++) sum[r][j] = all(0);
        for (int64_t h = 0; h < wide; h += 4, keys += 4)
            for (int r = 0; r < rows; r++) {
                V four = four_times(q + r * wide + h);
                for (int j = 0; j < 4; j++) sum[r][j] += four * keys[j];
            }
        for (int r = 0; r < rows; r++) store(scores + r * KEYS + strip * W, sums_of_fours(sum[r]));
    }
}

/* Turns scores into weights and updates their sum and the highest score.  Returns the factor of all earlier results. */
static float weigh(float *scores, float *weights, float *highest, int64_t from, int64_t to) {
    int64_t first = from / W * W, last = whole(to);
    for (int64_t k = first; k < from; k++) scores[k] = -INFINITY;
    for (int64_t k = to; k < last; k++) scores[k] = -INFINITY;
    V lanes = all(-INFINITY);
    for (int64_t k = first; k < last; k += W) lanes = higher(load(scores + k), lanes);
    float top = *highest, shrink = 1;
    for (int i = 0; i < W; i++) top = lanes[i] > top ? lanes[i] : top;
    V sum = load(weights);
    if (top > *highest) {
        V by = exponential(all(*highest - top));
        shrink = by[0], *highest = top, sum *= by;
    }
    V under = all(top == -INFINITY ? 0 : top);
    for (int64_t k = first; k < last; k += W) {
        V weight = exponential(load(scores + k) - under);
        store(scores + k, weight), sum += weight;
    }
    store(weights, sum);
    return shrink;
}

INLINE void add_columns(const int rows, const int columns, const Scratch *in, int64_t column, const float *weights,
                        float *results, int64_t wide, int64_t from, int64_t to) {
    V sum[TILE][COLUMNS];
    const float *values = in->values + column;
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) sum[r][c] = load(results + r * wide + column + c * W);
    for (int64_t k = from; k < to; k++) {
        V value[COLUMNS];
        for (int c = 0; c < columns; c++) value[c] = load(values + in->values_at_K[k] + c * W);
        for (int c = 0; c < columns; c++) foresee(in, k % W, column + c * W);
        for (int r = 0; r < rows; r++) {
            V weight = all(weights[r * KEYS + k]);
            for (int c = 0; c < columns; c++) sum[r][c] += weight * value[c];
        }
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) store(results + r * wide + column + c * W, sum[r][c]);
}

INLINE void add_rows(const int rows, const Scratch *in, const float *weights, float *results, int64_t wide,
                     int64_t from, int64_t to) {
    int64_t column = 0;
    for (; column + COLUMNS * W <= wide; column += COLUMNS * W)
        add_columns(rows, COLUMNS, in, column, weights, results, wide, from, to);
    for (; column < wide; column += W) add_columns(rows, 1, in, column, weights, results, wide, from, to);
}

#define FOR_EACH(count, call) \
    switch (count) { \
        case 1: call(1); break; \
        case 2: call(2); break; \
        case 3: call(3); break; \
        case 4: call(4); break; \
        case 5: call(5); break; \
        case 6: call(6); break; \
    }

static void add(int rows, const Scratch *in, const float *weights, float *results, int64_t wide, int64_t from,
                int64_t to) {
    if (from >= to) return;
#define CALL(count) add_rows(count, in, weights, results, wide, from, to)
    FOR_EACH(rows, CALL)
#undef CALL
}

static void score_rows(int rows, const Scratch *in, const float *q, int64_t wide, float *scores, int64_t from,
                       int64_t to) {
    if (in->keys && rows == 1) {
        score_unpacked(1, in, q, wide, scores, from, to);
    } else if (in->keys) {
        score_unpacked(2, in, q, wide, scores, from, to);
    } else {
        for (; rows > 0; rows -= TOGETHER, q += TOGETHER * wide, scores += TOGETHER * KEYS) {
#define CALL(count) score(count <= TOGETHER ? count : TOGETHER, in, q, wide, scores, from, to)
            FOR_EACH(rows < TOGETHER ? rows : TOGETHER, CALL)
#undef CALL
        }
    }
}

/* Processes a block for a tile of rows; the first is ``row`` of the item.  from, to: keys that each row sees. */
static void meet(int rows, int64_t row, const Scratch *in, int64_t wide, const int64_t *from, const int64_t *to) {
    int64_t first = KEYS, last = 0, all_from = 0, all_to = KEYS;
    for (int r = 0; r < rows; r++) {
        all_from = from[r] > all_from ? from[r] : all_from, all_to = to[r] < all_to ? to[r] : all_to;
        if (from[r] < to[r]) first = from[r] < first ? from[r] : first, last = to[r] > last ? to[r] : last;
    }
    if (first >= last) return;
    if (all_from > all_to) all_from = all_to = KEYS; /* there is no key that all see */
    score_rows(rows, in, in->queries + row * wide, wide, in->scores, first, last);
    float *results = in->results + row * wide;
    for (int r = 0; r < rows; r++) {
        if (from[r] >= to[r]) continue;
        float *scores = in->scores + r * KEYS, *result = results + r * wide;
        float shrink = weigh(scores, in->weights + (row + r) * W, in->highest + row + r, from[r], to[r]);
        if (shrink != 1)
            for (int64_t h = 0; h < wide; h += W) store(result + h, load(result + h) * shrink);
        add(1, in, scores, result, wide, from[r], to[r] < all_from ? to[r] : all_from);
    }
    add(rows, in, in->scores, results, wide, all_from, all_to);
    for (int r = 0; r < rows; r++)
        add(1, in, in->scores + r * KEYS, results + r * wide, wide, all_to, to[r]);
}

/* Processes a block for the rows of one position: a few keys for all groups of heads, then the next, as they lie. */
static void meet_together(int64_t heads, int64_t groups, Scratch *in, const float *keys, const float *values, int64_t H,
                          int64_t from, int64_t to) {
    int64_t step = groups == 1 ? KEYS : W, size;
    for (int64_t k = from, next; k < to; k = next) {
        next = k / step * step + step < to ? k / step * step + step : to;
        in->coming_at = in->at_K + (next < to ? next : from / W * W);
        for (int64_t g = 0; g < groups; g++) {
            in->coming = step > W ? NULL : (next < to ? keys : values) + g * H;
            in->keys = heads <= 2 ? keys + g * H : NULL;
            if (!in->keys) pack_keys(in, keys + g * H, H, k, next);
            for (int64_t r = 0; r < heads; r += size) {
                size = heads - r < TILE ? heads - r : TILE;
                int64_t row = g * heads + r;
                score_rows(size, in, in->queries + row * H, H, in->scores + row * KEYS, k, next);
                in->coming = NULL;
            }
        }
    }
    for (int64_t row = 0; row < groups * heads; row++) {
        float shrink = weigh(in->scores + row * KEYS, in->weights + row * W, in->highest + row, from, to);
        if (shrink != 1)
            for (int64_t h = row * H; h < (row + 1) * H; h += W)
                store(in->results + h, load(in->results + h) * shrink);
    }
    in->values_at_K = in->at_K;
    for (int64_t k = from, next; k < to; k = next) {
        next = k / step * step + step < to ? k / step * step + step : to;
        in->coming_at = in->at_K + next;
        for (int64_t g = 0; g < groups; g++) {
            in->values = values + g * H;
            in->coming = step > W || next == to ? NULL : in->values;
            for (int64_t r = 0; r < heads; r += size) {
                size = heads - r < TILE ? heads - r : TILE;
                int64_t row = g * heads + r;
                add(size, in, in->scores + row * KEYS, in->results + row * H, H, k, next);
                in->coming = NULL;
            }
        }
    }
}

/* Computes an item for the groups of heads first_g:last_g, which together have at most ROWS rows. */
static void attend_item(const Attention *is, const float *q_TQH, const float *keys_SGH, const float *values_SGH,
                        float *out_TQH, int64_t window, int64_t item, int64_t first_g, int64_t last_g, Scratch *in) {
    int64_t H = is->H, wide = whole(H), heads = is->Q / is->G, b = is->items_I2[2 * item];
    int64_t first_token = is->query_starts_B1[b], count = is->query_starts_B1[b + 1] - first_token;
    int64_t first_row = (int64_t)is->items_I2[2 * item + 1] * ROWS, rows = count * heads - first_row;
    int64_t before = is->lengths_B[b] - count; /* tokens before the first query */
    if (rows > ROWS) rows = ROWS;
    int64_t all_rows = rows * (last_g - first_g), place_R[ROWS];
    for (int64_t r = 0; r < all_rows; r++) {
        int64_t row = first_row + r % rows;
        place_R[r] = ((first_token + row / heads) * is->Q + (first_g + r / rows) * heads + row % heads) * H;
        const float *q = q_TQH + place_R[r];
        float *query = in->queries + r * wide;
        for (int64_t h = 0; h < H; h++) query[h] = q[h] * is->scale;
        for (int64_t h = H; h < wide; h++) query[h] = 0;
        in->highest[r] = -INFINITY;
    }
    memset(in->results, 0, sizeof(float) * all_rows * wide);
    memset(in->weights, 0, sizeof(float) * all_rows * W);
    int64_t end = before + (first_row + rows - 1) / heads + 1, first_end = before + first_row / heads + 1;
    int64_t start = window && first_end > window ? first_end - window : 0;
    for (int64_t block = start / KEYS * KEYS; block < end; block += KEYS) {
        int64_t first = start > block ? start - block : 0, last = end - block < KEYS ? end - block : KEYS;
        find(is, in, is->pages_BP + b * is->P, block, first, last);
        if (count == 1 && wide == H) {
            meet_together(rows, last_g - first_g, in, keys_SGH + first_g * H, values_SGH + first_g * H, H, first, last);
            continue;
        }
        for (int64_t g = first_g; g < last_g; g++) {
            in->keys = NULL;
            pack_keys(in, keys_SGH + g * H, H, first, last);
            in->values = values_SGH + g * H, in->values_at_K = in->at_K;
            if (wide != H) widen(in, H, first, last);
            for (int64_t tile = 0; tile < rows; tile += TILE) {
                int64_t from[TILE], to[TILE], size = rows - tile < TILE ? rows - tile : TILE;
                for (int64_t r = 0; r < size; r++) {
                    int64_t row_end = before + (first_row + tile + r) / heads + 1 - block;
                    from[r] = window && row_end > window ? row_end - window : 0;
                    to[r] = row_end < KEYS ? row_end : KEYS;
                }
                meet(size, (g - first_g) * rows + tile, in, wide, from, to);
            }
        }
    }
    for (int64_t r = 0; r < all_rows; r++) {
        float *out = out_TQH + place_R[r], sum = 0;
        for (int i = 0; i < W; i++) sum += in->weights[r * W + i];
        sum = 1 / sum;
        for (int64_t h = 0; h < H; h++) out[h] = in->results[r * wide + h] * sum;
    }
}

/* Cuts a step, whose pages, lengths and starts are set, into items.  is->I counts all; ``room`` of them are written.
   window: that of the layer that sees most.  threads: at most; there must be scratch for as many.
   Returns the first sequence with an impossible page or length, or -1. */
int64_t attention_plan(Attention *is, int64_t window, int64_t threads, int32_t *items_I2, int64_t room) {
    int64_t heads = is->Q / is->G, products = 0;
    is->I = 0;
    for (int64_t b = 0; b < is->B; b++) {
        const int32_t *pages_P = is->pages_BP + b * is->P;
        int64_t length = is->lengths_B[b], count = is->query_starts_B1[b + 1] - is->query_starts_B1[b];
        int64_t end = length - count + 1, start = window && end > window ? end - window : 0;
        if (count < 0 || count > length || length > is->P * is->page_size) return b;
        for (int64_t p = start / is->page_size; p * is->page_size < length; p++)
            if (pages_P[p] < 0 || pages_P[p] >= is->num_pages) return b;
        products += length * count * is->Q * is->H;
        for (int64_t part = 0; part * ROWS < count * heads; part++, is->I++)
            if (is->I < room) items_I2[2 * is->I] = b, items_I2[2 * is->I + 1] = part;
    }
    is->items_I2 = items_I2;
    is->threads = products < is->worth ? 1 : threads;
    is->together = is->threads == 1 || is->I >= 2 * threads;
    return -1;
}

/* A layer of a step. */
typedef struct {
    const Attention *step;
    const float *q_TQH, *keys_SGH, *values_SGH;
    float *out_TQH;
    int64_t window;
} Layer;

static void attend_of(const void *of, int64_t number, int64_t thread) {
    const Layer *layer = of;
    const Attention *is = layer->step;
    int64_t i = is->I * is->G - 1 - number; /* a prompt's last items see most keys, so they go first */
    int64_t item = i / is->G, g = i % is->G, b = is->items_I2[2 * item], end = g + 1;
    if (is->together && (is->query_starts_B1[b + 1] - is->query_starts_B1[b]) * is->Q <= ROWS) {
        if (g) return;
        end = is->G;
    }
    Scratch in = scratch_at(is->scratch + thread * attention_scratch(is->H), is->H);
    attend_item(is, layer->q_TQH, layer->keys_SGH, layer->values_SGH, layer->out_TQH, layer->window, item, g, end, &in);
}

/* Writes out_TQH for the tokens of all sequences.  window: keys that a query sees, counted back; 0 for all. */
void attend(const Attention *is, const float *q_TQH, const float *keys_SGH, const float *values_SGH, float *out_TQH,
            int64_t window) {
    Layer layer = {is, q_TQH, keys_SGH, values_SGH, out_TQH, window};
    share(is->threads, is->I * is->G, attend_of, &layer);
}
