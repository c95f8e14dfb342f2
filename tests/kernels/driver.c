/* A program that calls products.c, blocks.c, attention.c and recurrent.c with numbers by chance, next to their
   definitions in double.  tests/kernels/test_driver.py compiles it for kinds of CPUs that this machine is not.

   It prints "rows", and a hash of the rows of all formats of blocks; or what is wrong.

   Legend: T rows, I inputs, O outputs, L keys of a sequence, H head size. */

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cpu.h"

enum { FLOATS, HALVES, UPPER_HALVES, PAIRS, BYTES, FINE_BYTES, KINDS };
enum { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, MXFP4, HALF32, HALF64, HALF128, UPPER32, UPPER64, UPPER128, FORMATS };

static const int64_t SIZES[FORMATS] = {32, 32, 32, 32, 32, 256, 256, 256, 32, 32, 64, 128, 32, 64, 128};
static const int64_t BLOCK_BYTES[FORMATS] = {18, 20, 22, 24, 34, 144, 176, 210, 17, 19, 35, 67, 19, 35, 67};

typedef struct {
    const char *panels;
    int64_t format, O, parts;
} Blocks;

int64_t panel_width(void);
int64_t packed_bytes(const Weight *weight);
void pack(const Weight *weight, const float *w_OI, char *panels, int64_t threads);
int64_t product(const Weight *weight, const float *x_TI, int64_t x_step, const float *bias_O, float *y_TO, int64_t T,
                int64_t threads);
int64_t blocks_bytes(int64_t format, int64_t O, int64_t I);
int64_t blocks_pack(int64_t format, int64_t O, int64_t I, const uint8_t *rows, char *panels, int64_t threads);
void blocks_rows(const Weight *weight, const int64_t *outputs_T, float *out_TI, int64_t T);
int64_t blocks_product(const Weight *weight, const float *x_TI, int64_t x_step, const float *bias_O, float *y_TO,
                       int64_t T, int64_t threads);
int64_t attention_scratch(int64_t H);

static uint64_t state = 1;

static uint32_t dice(uint32_t below) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (state >> 33) % below;
}

/* About normal. */
static float number(void) {
    float sum = -6;
    for (int i = 0; i < 12; i++) sum += dice(1 << 20) * 0x1p-20f;
    return sum;
}

static float *numbers(int64_t count) {
    float *x = malloc(count * sizeof *x + 1);
    for (int64_t i = 0; i < count; i++) x[i] = number();
    return x;
}

static void fail(const char *what, int64_t kind, int64_t parts, float found, double expected) {
    printf("%s of kind %d, %d parts: %g, not %g\n", what, (int)kind, (int)parts, found, expected);
    exit(1);
}

/* Compares y with x W^T + bias, and with each row alone.  error: of a product, relative to the sum of magnitudes of its
   terms.  unit: of the row's largest number, by which each number may be off; w_unit: the same of a weight. */
static void check(const Weight *weight, const float *w_OI, int64_t T, double error, double unit, double w_unit,
                  int64_t parts) {
    int64_t O = weight->O, I = weight->I;
    float *x = numbers(T * (I + 3)), *bias = numbers(O), *y = numbers(T * O), *alone = numbers(O);
    if (weight->product(weight, x, I + 3, bias, y, T, 1)) fail("memory", weight->kind, parts, 0, 1);
    for (int64_t t = 0; t < T; t++) {
        const float *row = x + t * (I + 3);
        weight->product(weight, row, I, bias, alone, 1, 1);
        if (memcmp(alone, y + t * O, O * sizeof *y)) fail("bits of a row", weight->kind, parts, y[t * O], alone[0]);
        double most = 0;
        for (int64_t i = 0; i < I; i++) most = fabs(row[i]) > most ? fabs(row[i]) : most;
        for (int64_t o = 0; o < O; o++) {
            double sum = bias[o], terms = 1, bound = 0, w_most = 0;
            for (int64_t i = 0; i < I; i++) w_most = fabs(w_OI[o * I + i]) > w_most ? fabs(w_OI[o * I + i]) : w_most;
            for (int64_t i = 0; i < I; i++) {
                double w = w_OI[o * I + i];
                sum += row[i] * w, terms += fabs(row[i] * w);
                bound += unit * most * (fabs(w) + w_unit * w_most) + fabs(row[i]) * w_unit * w_most;
            }
            if (!(fabs(y[t * O + o] - sum) <= bound + terms * error)) fail("product", weight->kind, parts, y[t * O + o], sum);
        }
    }
    free(x), free(bias), free(y), free(alone);
}

static void check_panels(int64_t kind, int64_t T, int64_t I, int64_t O) {
    Weight weight = {0, O, I, kind, product, 0};
    float *w = numbers(O * I);
    for (int64_t i = 0; i < O * I; i++) { /* what a float of 16 bits can hold: 8 bits of a number near 1 */
        float sign = dice(2) ? 1 : -1;
        if (kind == HALVES || kind == UPPER_HALVES || kind == PAIRS) w[i] = (1 + dice(128) / 128.0f) * sign;
    }
    char *panels = aligned_alloc(64, packed_bytes(&weight) + 63 & -64);
    pack(&weight, w, panels, 1);
    weight.panels = panels;
    double error = kind == PAIRS ? 0x1p-8 : I * 0x1p-23;
    if (kind < BYTES)
        check(&weight, w, T, error, 0, 0, 1);
    else
        check(&weight, w, T, 1e-5, 0.51 / (kind == BYTES ? 63 : 8191), 0.51 / 126, 1);
    free(panels), free(w);
}

/* Returns a block's scale: from 0.5 to 2, as a float16 or bfloat16. */
static uint16_t scale(int64_t format) {
    uint16_t sign = dice(2) << 15;
    return (format < UPPER32 ? 0x3800 + dice(0x800) : 0x3f00 + dice(0x100)) | sign;
}

static uint64_t check_blocks(int64_t format, int64_t parts, int64_t T, int64_t I, int64_t O, uint64_t hash) {
    int64_t blocks = O * I / SIZES[format];
    uint8_t *stored = malloc(blocks * BLOCK_BYTES[format]), *at = stored;
    for (int64_t b = 0; b < blocks; b++, at += BLOCK_BYTES[format]) {
        for (int64_t i = 0; i < BLOCK_BYTES[format]; i++) at[i] = dice(256);
        uint16_t one = scale(format), other = scale(format);
        memcpy(format == Q6_K ? at + 208 : at, &one, 2);
        if (format == Q4_1 || format == Q5_1 || format == Q4_K || format == Q5_K) memcpy(at + 2, &other, 2);
        if (format == MXFP4) at[0] = 125 + dice(4), at[1] = dice(256);
        if (format >= HALF32) at[2] = dice(17);
    }
    char *panels = aligned_alloc(64, blocks_bytes(format, O, I) + 63 & -64);
    Blocks all = {panels, format, O, parts};
    if (blocks_pack(format, O, I, stored, panels, 1)) fail("scales", format, parts, 0, 1);
    Weight weight = {&all, O, I, 1, blocks_product, blocks_rows};
    float *w = malloc(O * I * sizeof *w);
    for (int64_t o = 0; o < O; o++) blocks_rows(&weight, &o, w + o * I, 1);
    for (int64_t i = 0; i < O * I; i++) {
        uint32_t bits;
        memcpy(&bits, w + i, sizeof bits);
        if (w[i] == 0) bits = 0; /* its sign is left to the compiler */
        hash = (hash ^ bits) * 1099511628211u;
    }
    check(&weight, w, T, 1e-6, parts < 3 ? 1.0 / (126 << 7 * (parts - 1)) : 1e-6, 0, parts);
    free(stored), free(panels), free(w);
    return hash;
}

static void check_attention(int64_t L, int64_t T, int64_t Q, int64_t G, int64_t H) {
    int64_t page = 16, pages = (L + page - 1) / page;
    int32_t *page_P = malloc(pages * sizeof *page_P), length = L, starts[2] = {0, T}, items[64];
    for (int64_t p = 0; p < pages; p++) page_P[p] = pages - 1 - p;
    float *q = numbers(T * Q * H), *keys = numbers(pages * page * G * H), *values = numbers(pages * page * G * H);
    float *out = numbers(T * Q * H);
    Attention is = {page_P, &length, starts, items, aligned_alloc(64, attention_scratch(H) * 4 + 63 & -64),
                    1, pages, 0, Q, G, H, page, page, pages, 1, 1, 0, 1 / sqrtf(H)};
    if (attention_plan(&is, 0, 1, items, 32) >= 0 || is.I > 32) fail("plan", 0, 0, is.I, 0);
    attend(&is, q, keys, values, out, 0);
    for (int64_t t = 0; t < T; t++)
        for (int64_t h = 0; h < Q; h++) {
            double total = 0, sums[256] = {0};
            for (int64_t l = 0; l < L - T + t + 1; l++) {
                int64_t at = ((page_P[l / page] * page + l % page) * G + h / (Q / G)) * H;
                double score = 0;
                for (int64_t i = 0; i < H; i++) score += q[(t * Q + h) * H + i] * keys[at + i];
                double weight = exp(score / sqrt(H));
                total += weight;
                for (int64_t i = 0; i < H; i++) sums[i] += weight * values[at + i];
            }
            for (int64_t i = 0; i < H; i++)
                if (!(fabs(out[(t * Q + h) * H + i] - sums[i] / total) < 1e-4))
                    fail("attention", L, T, out[(t * Q + h) * H + i], sums[i] / total);
        }
    free(page_P), free(q), free(keys), free(values), free(out), free(is.scratch);
}

/* Compares a convolution of two taps, with silu, and behind it the gated delta rule or Mamba 2 of one head. */
static void check_recurrence(int64_t rule, int64_t T, int64_t K, int64_t U) {
    int64_t C = 2 * K + U, slot = 0;
    int32_t starts[] = {0, T}, fresh = 1;
    Rows rows = {&slot, starts, &fresh, 1, 1};
    float *x = numbers(T * C), *taps = numbers(2 * C), *y = numbers(T * C), *a = numbers(T), *b = numbers(T);
    float *window = numbers(C), *m = numbers(K * U), *gates = numbers(2 * T), *o = numbers(T * U);
    float decay = -0.5f, bias = 0.3f, skip = 0.7f, least = 0.01f;
    double *exact = calloc(K * U, sizeof *exact);
    convolve(&rows, x, C, taps, NULL, window, 0, y, C, 2, 1);
    for (int64_t t = 0; t < T; t++)
        for (int64_t c = 0; c < C; c++) {
            double sum = (t ? x[(t - 1) * C + c] * (double)taps[c] : 0) + x[t * C + c] * (double)taps[C + c];
            sum /= 1 + exp(-sum);
            if (!(fabs(y[t * C + c] - sum) < 1e-5)) fail("convolution", t, c, y[t * C + c], sum);
        }
    if (rule)
        delta(&rows, y, a, 1, b, 1, &decay, &bias, 1.0f, gates, NULL, m, 0, o, 1, 1, K, U);
    else
        ssd(&rows, y, a, 1, &decay, &bias, &skip, least, gates, m, 0, o, 1, 1, K, U);
    for (int64_t t = 0; t < T; t++) {
        const float *q = y + t * C + (rule ? 0 : U + K), *k = y + t * C + (rule ? K : U), *v = y + t * C + (rule ? 2 * K : 0);
        double size = log1p(exp(a[t] + bias)), faded = exp(decay * size);
        double factor = rule ? 1 / (1 + exp(-b[t])) : size > least ? size : least;
        for (int64_t u = 0; u < U; u++) {
            double known = 0, found = rule ? 0 : skip * v[u];
            for (int64_t i = 0; i < K && rule; i++) known += k[i] * faded * exact[i * U + u];
            for (int64_t i = 0; i < K; i++) {
                double *cell = exact + i * U + u;
                *cell = *cell * faded + k[i] * factor * (v[u] - known);
                found += q[i] * *cell;
            }
            if (!(fabs(o[t * U + u] - found) < 1e-4 * (1 + fabs(found)))) fail("recurrence", rule, U, o[t * U + u], found);
        }
    }
    free(x), free(taps), free(y), free(a), free(b), free(window), free(m), free(gates), free(o), free(exact);
}

int main(void) {
    static const int64_t ROWS[] = {1, 2, 3, 5, 8, 13, 33, 0};
    uint64_t hash = 14695981039346656037u;
    if (!panel_width()) return puts("there are no vectors"), 1;
    for (const int64_t *T = ROWS; *T; T++) {
        for (int64_t kind = 0; kind < KINDS; kind++) {
            int64_t I = 1 + dice(150), O = 1 + dice(80);
            check_panels(kind, *T, I, O);
        }
        for (int64_t format = 0; format < FORMATS; format++) {
            int64_t parts = 1 + dice(3), blocks = 1 + dice(2), O = 1 + dice(80);
            hash = check_blocks(format, parts, *T, SIZES[format] * blocks, O, hash);
        }
        check_attention(*T + dice(200), *T, 4, 2, 24);
        check_attention(*T + dice(200), *T, 3, 3, 64);
        int64_t key = 1 + dice(40), value = 1 + dice(150);
        check_recurrence(*T % 2, *T, key, value);
    }
    printf("rows %016llx\n", (unsigned long long)hash);
    return 0;
}
