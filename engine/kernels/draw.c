/* The last part of sampling: drawing a row's token from its weights, or taking its likeliest token.
   engine/kernels/cpu.py calls these functions.  Results equal those of engine/sampling/draw.py to the bit: flags in
   compiled.py forbid other orders of additions and fused multiplications and additions.

   Legend: n rows, V vocabulary, C blocks of the padded vocabulary, B tokens of a block. */

#include <math.h>

#include "cpu.h"

#define LANES 16

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

/* starts_n: start of the stream of each row's seed; a number of a stream is that of uniforms(). */
void draw(const float *weights_nCB, const float *sums_nC, const int64_t *starts_n, const int64_t *positions_n,
          int64_t *token_ids_n, int64_t n, int64_t C, int64_t B) {
    for (int64_t r = 0; r < n; r++) {
        const float *sums = sums_nC + r * C;
        uint64_t bits = mixed((uint64_t)starts_n[r] + (uint64_t)positions_n[r] * 0x9E3779B97F4A7C15u) >> 12;
        double end, total = sum_of(sums, C), target = ((double)bits + 0.5) * 0x1p-52 * total;
        int64_t block = first_above(sums, C, total, target, &end);
        const float *weights = weights_nCB + (r * C + block) * B;
        double rest = target - (end - (double)sums[block]);
        token_ids_n[r] = block * B + first_above(weights, B, sum_of(weights, B), rest < 0 ? 0 : rest, &end);
    }
}

/* Writes the first of each row's likeliest tokens; -1 if the largest logit is not finite, or one is NaN. */
void likeliest(const float *logits_nV, int64_t *token_ids_n, int64_t n, int64_t V) {
    for (int64_t r = 0; r < n; r++) {
        const float *logits = logits_nV + r * V;
        float tops[LANES], top = -INFINITY;
        int32_t nan[LANES] = {0}, any_nan = 0;
        int64_t v = 0;
        for (int lane = 0; lane < LANES; lane++) tops[lane] = -INFINITY;
        for (; v + LANES <= V; v += LANES)
            for (int lane = 0; lane < LANES; lane++) {
                float x = logits[v + lane];
                tops[lane] = x > tops[lane] ? x : tops[lane];
                nan[lane] |= x != x;
            }
        for (; v < V; v++) {
            top = logits[v] > top ? logits[v] : top;
            any_nan |= logits[v] != logits[v];
        }
        for (int lane = 0; lane < LANES; lane++) {
            top = tops[lane] > top ? tops[lane] : top;
            any_nan |= nan[lane];
        }
        token_ids_n[r] = -1;
        if (!any_nan && isfinite(top))
            for (v = 0; token_ids_n[r] < 0; v++)
                if (logits[v] == top) token_ids_n[r] = v;
    }
}
