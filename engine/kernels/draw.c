/* Sampling: a row's weights, drawing a token from them or taking the likeliest one, and what log probabilities need.
   engine/kernels/cpu.py calls these functions.  A row's results depend on no other row and not on threads.  Drawn tokens
   are those of engine/sampling/draw.py, with the same uniform numbers; sums of weights differ by rounding, so a number on
   the border between two tokens may give the other one.  Flags in sources.py forbid the compiler other orders of
   additions, and fused multiplications and additions, of which copies of a function might have different ones.

   Legend: n rows, N vocabulary, U vocabulary rounded up to whole blocks, C blocks of that, B tokens of a block. */

#include <math.h>
#include <string.h>

#include "cpu.h"
#include "lanes.h"

#define LOWEST 1.9e-35f /* what is not above it is no weight, as in draw.py */
#define SUMMED 512     /* exponentials that are summed as floats, before these sums are summed as doubles */

static uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

/* Returns the first index whose sum exceeds the target, or the last that added to the sum; *end gets the sum there. */
static int64_t first_above(const float *x, int64_t size, double total, double target, double *end) {
    int64_t above = 0, last = 0;
    double sum = 0;
    for (int64_t i = 0; i < size; i++) {
        sum += x[i];
        above += sum <= target;
        last += sum < total;
    }
    above = above < last ? above : last;
    *end = 0;
    for (int64_t i = 0; i <= above; i++) *end += x[i];
    return above;
}

static double sum_of(const float *x, int64_t size) {
    double sum = 0;
    for (int64_t i = 0; i < size; i++) sum += x[i];
    return sum;
}

/* The next W numbers of a row, and ``other`` behind its end. */
INLINE V next_of(const float *x, int64_t left, float other) {
    if (left >= W) return load(x);
    V v = all(other);
    if (left > 0) memcpy(&v, x, sizeof(float) * left);
    return v;
}

/* Returns the largest number; NaN if one is NaN. */
static float top_of(const float *x, int64_t size) {
    V tops = all(-INFINITY);
    Bits nan = {0};
    for (int64_t i = 0; i < size; i += W) {
        V next = next_of(x + i, size - i, -INFINITY);
        Bits above = (Bits)(next > tops);
        tops = (V)(((Bits)next & above) | ((Bits)tops & ~above));
        nan |= (Bits)(next != next);
    }
    float top = -INFINITY;
    for (int lane = 0; lane < W; lane++) {
        top = tops[lane] > top ? tops[lane] : top;
        if (nan[lane]) return NAN;
    }
    return top;
}

typedef struct {
    const float *x_nN, *factors_n;
    const int64_t *starts_n, *positions_n;
    float *tops_n, *scores_nU, *weights_nU, *sums_nC, *logs_n;
    int64_t *token_ids_n;
    int64_t n, N, U, C;
} Sampled;

/* Returns a row's largest number.  scores, weights: as for ``weigh_rows``; each may be NULL. */
INLINE float weigh(const float *x, float factor, float *scores, float *weights, int64_t N, int64_t U) {
    float top = top_of(x, N);
    for (int64_t i = 0; i < U; i += W) {
        V score = (next_of(x + i, N - i, 0) - top) * factor;
        for (int64_t lane = N - i > 0 ? N - i : 0; lane < W; lane++) score[lane] = -INFINITY;
        if (scores) store(scores + i, score);
        if (!weights) continue;
        V weight = exponential(score);
        store(weights + i, (V)((Bits)weight & (Bits)(weight > LOWEST)));
    }
    return top;
}

static void weigh_of(const void *of, int64_t item, int64_t thread) {
    const Sampled *is = of;
    int64_t N = is->N, U = is->U;
    EACH_ROW(r, item, ROWS_AT_ONCE(N), is->n)
        is->tops_n[r] = weigh(is->x_nN + r * N, is->factors_n[r], is->scores_nU + r * U,
                              is->weights_nU ? is->weights_nU + r * U : 0, N, U);
}

/* scores_nU: (x - top) times the row's factor, and -inf behind the vocabulary.  weights_nU: e to these; NULL for none.
   tops_n: each row's largest number, or NaN. */
void weigh_rows(const float *x_nN, const float *factors_n, float *tops_n, float *scores_nU, float *weights_nU, int64_t n,
                int64_t N, int64_t U, int64_t threads) {
    Sampled is = {
        .x_nN = x_nN, .factors_n = factors_n, .tops_n = tops_n, .scores_nU = scores_nU, .weights_nU = weights_nU,
        .n = n, .N = N, .U = U,
    };
    share(worth(threads, n * N), ITEMS(n, ROWS_AT_ONCE(N)), weigh_of, &is);
}

/* Draws a row's token.  A number of a stream is that of uniforms(). */
INLINE int64_t drawn(const Sampled *is, int64_t r) {
    int64_t C = is->C, B = is->U / C;
    const float *weights_CB = is->weights_nU + r * is->U;
    float *sums = is->sums_nC + r * C;
    for (int64_t block = 0; block < C; block++) {
        V lanes = all(0);
        for (int64_t i = 0; i < B; i += W) lanes += load(weights_CB + block * B + i);
        sums[block] = 0;
        for (int lane = 0; lane < W; lane++) sums[block] += lanes[lane];
    }
    uint64_t bits = mixed((uint64_t)is->starts_n[r] + (uint64_t)is->positions_n[r] * 0x9E3779B97F4A7C15u) >> 12;
    double end, total = sum_of(sums, C), target = ((double)bits + 0.5) * 0x1p-52 * total;
    int64_t block = first_above(sums, C, total, target, &end);
    const float *weights = weights_CB + block * B;
    double rest = target - (end - (double)sums[block]);
    return block * B + first_above(weights, B, sum_of(weights, B), rest < 0 ? 0 : rest, &end);
}

static void draw_of(const void *of, int64_t item, int64_t thread) {
    const Sampled *is = of;
    int64_t N = is->N, U = is->U;
    EACH_ROW(r, item, ROWS_AT_ONCE(U), is->n) {
        int finite = !is->x_nN || isfinite(weigh(is->x_nN + r * N, is->factors_n[r], 0, is->weights_nU + r * U, N, U));
        is->token_ids_n[r] = finite ? drawn(is, r) : -1;
    }
}

/* starts_n: start of the stream of each row's seed.  sums_nC: room for the sums of blocks. */
void draw(const float *weights_nU, float *sums_nC, const int64_t *starts_n, const int64_t *positions_n,
          int64_t *token_ids_n, int64_t n, int64_t U, int64_t C, int64_t threads) {
    Sampled is = {
        .weights_nU = (float *)weights_nU, .sums_nC = sums_nC, .starts_n = starts_n, .positions_n = positions_n,
        .token_ids_n = token_ids_n, .n = n, .U = U, .C = C,
    };
    share(worth(threads, n * U), ITEMS(n, ROWS_AT_ONCE(U)), draw_of, &is);
}

/* The same after weigh_rows, as one loop; -1 for a row whose largest number is not finite, or that has a NaN.
   weights_nU: room for them. */
void weigh_and_draw(const float *x_nN, const float *factors_n, float *weights_nU, float *sums_nC, const int64_t *starts_n,
                    const int64_t *positions_n, int64_t *token_ids_n, int64_t n, int64_t N, int64_t U, int64_t C,
                    int64_t threads) {
    Sampled is = {
        .x_nN = x_nN, .factors_n = factors_n, .weights_nU = weights_nU, .sums_nC = sums_nC, .starts_n = starts_n,
        .positions_n = positions_n, .token_ids_n = token_ids_n, .n = n, .N = N, .U = U, .C = C,
    };
    share(worth(threads, n * U), ITEMS(n, ROWS_AT_ONCE(U)), draw_of, &is);
}

static void log_sums_of(const void *of, int64_t item, int64_t thread) {
    const Sampled *is = of;
    int64_t N = is->N;
    EACH_ROW(r, item, ROWS_AT_ONCE(N), is->n) {
        const float *x = is->x_nN + r * N;
        float top = is->tops_n[r] = top_of(x, N);
        double total = 0;
        for (int64_t block = 0; block < N; block += SUMMED) {
            V lanes = all(0);
            for (int64_t i = block; i < N && i < block + SUMMED; i += W)
                lanes += exponential(next_of(x + i, N - i, -INFINITY) - top);
            for (int lane = 0; lane < W; lane++) total += lanes[lane];
        }
        is->logs_n[r] = (float)logl(total); /* log would ask for a C library of 2.29 */
    }
}

/* tops_n: each row's largest number, or NaN.  logs_n: the logarithm of the sum of e to each number less that. */
void log_sums(const float *x_nN, float *tops_n, float *logs_n, int64_t n, int64_t N, int64_t threads) {
    Sampled is = {.x_nN = x_nN, .tops_n = tops_n, .logs_n = logs_n, .n = n, .N = N};
    share(worth(threads, n * N), ITEMS(n, ROWS_AT_ONCE(N)), log_sums_of, &is);
}

static void likeliest_of(const void *of, int64_t item, int64_t thread) {
    const Sampled *is = of;
    int64_t N = is->N;
    EACH_ROW(r, item, ROWS_AT_ONCE(N), is->n) {
        const float *logits = is->x_nN + r * N;
        float top = top_of(logits, N);
        is->token_ids_n[r] = -1;
        if (isfinite(top))
            for (int64_t v = 0; is->token_ids_n[r] < 0; v++)
                if (logits[v] == top) is->token_ids_n[r] = v;
    }
}

/* Writes the first of each row's likeliest tokens; -1 if the largest logit is not finite, or one is NaN. */
void likeliest(const float *logits_nN, int64_t *token_ids_n, int64_t n, int64_t N, int64_t threads) {
    Sampled is = {.x_nN = logits_nN, .token_ids_n = token_ids_n, .n = n, .N = N};
    share(worth(threads, n * N), ITEMS(n, ROWS_AT_ONCE(N)), likeliest_of, &is);
}
