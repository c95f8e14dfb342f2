/* What recurrent layers compute between their products on a CPU: a causal convolution, the gated delta rule, Mamba 2,
   and the norm and gate behind these.  engine/kernels/recurrent.py calls these functions and documents them.

   The tokens of a row are computed one after another, in prompts as in decodes, and each number is a sum of one order.
   So a result depends only on a row's tokens so far: not on the chunk that they came in, other rows, or threads.  Some
   columns of a head's matrix depend on no others; a prompt keeps as many of them as fit into the first cache.

   Legend: T tokens, B rows, S slots, C channels, K taps or size of a key, U size of a value, G heads with a key,
   H heads with a value, A decays of all heads, N numbers of a group. */

#include <math.h>
#include <string.h>

#include "cpu.h"
#include "lanes.h"

#define CHANNELS 512   /* that one item convolves */
#define COLUMNS 4      /* vectors of a matrix's columns that are computed together */
#define UNIT_EPS 1e-6f /* added to the squared length of queries and keys */

/* The first ``count`` numbers, at most a vector, and zeros. */
INLINE V some(const float *from, int64_t count) {
    V v = {0};
    if (count >= W) return load(from);
    memcpy(&v, from, sizeof(float) * count);
    return v;
}

INLINE void put(float *to, V v, int64_t count) {
    if (count >= W)
        store(to, v);
    else
        memcpy(to, &v, sizeof(float) * count);
}

/* x sigmoid(x), or sigmoid(x). */
INLINE V gate_of(V x, int64_t is_sigmoid) {
    V power = exponential((V)((Bits)x | 0x80000000u));
    Bits is = (Bits)(x >= 0.0f);
    V top = (V)(((Bits)all(1) & is) | ((Bits)power & ~is));
    return (is_sigmoid ? top : x * top) / (1 + power);
}

INLINE V silu(V x) { return gate_of(x, 0); }

static float squares(const float *x, int64_t N) {
    V sums = {0};
    for (int64_t n = 0; n < N; n += W) {
        V v = some(x + n, N - n);
        sums += v * v;
    }
    float sum = 0;
    for (int i = 0; i < W; i++) sum += sums[i];
    return sum;
}

static float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }

/* The same of many: log(1 + y) is 2 atanh(z), as a series of z = y / (2 + y), which is at most 1 / 3. */
INLINE V softplus_of(V x) {
    V y = exponential((V)((Bits)x | 0x80000000u)), z = y / (2 + y), s = z * z, sum = all(1 / 17.0f);
    for (int n = 15; n > 0; n -= 2) sum = sum * s + 1.0f / n;
    return (V)((Bits)x & (Bits)(x > 0.0f)) + 2 * z * sum;
}

/* Where input ``at`` of a row is, the first of its window being 0. */
INLINE const float *input(const float *window, const float *x_TC, int64_t x_step, int64_t C, int64_t K, int64_t at) {
    return at < K - 1 ? window + at * C : x_TC + (at - (K - 1)) * x_step;
}

typedef struct {
    const Rows *rows;
    const float *x_TC, *weight_KC, *bias_C;
    float *windows_SKC, *y_TC;
    int64_t x_step, slot_step, C, K, with_silu;
} Convolution;

static void convolve_of(const void *of, int64_t item, int64_t thread) {
    const Convolution *is = of;
    const Rows *rows = is->rows;
    int64_t C = is->C, K = is->K, x_step = is->x_step, items = (C + CHANNELS - 1) / CHANNELS;
    int64_t b = item / items, first = item % items * CHANNELS, last = first + CHANNELS < C ? first + CHANNELS : C;
    int64_t start = rows->starts_B1[b], tokens = rows->starts_B1[b + 1] - start, bytes = sizeof(float) * (last - first);
    float *window = is->windows_SKC + rows->slots_B[b] * is->slot_step;
    const float *x = is->x_TC + start * x_step;
    for (int64_t k = 0; k < K - 1 && rows->fresh_B[b]; k++) memset(window + k * C + first, 0, bytes);
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t c = first; c < last; c += W) {
            V sum = {0};
            for (int64_t k = 0; k < K; k++)
                sum += some(is->weight_KC + k * C + c, last - c) *
                       some(input(window, x, x_step, C, K, t + k) + c, last - c);
            if (is->bias_C) sum += some(is->bias_C + c, last - c);
            put(is->y_TC + (start + t) * C + c, is->with_silu ? silu(sum) : sum, last - c);
        }
    for (int64_t k = 0; k < K - 1; k++)
        memcpy(window + k * C + first, input(window, x, x_step, C, K, tokens + k) + first, bytes);
}

/* bias_C: NULL for none.  windows_SKC: K - 1 inputs of each slot.  silu: whether it follows. */
void convolve(const Rows *rows, const float *x_TC, int64_t x_step, const float *weight_KC, const float *bias_C,
              float *windows_SKC, int64_t slot_step, float *y_TC, int64_t C, int64_t K, int64_t with_silu) {
    Convolution is = {rows, x_TC, weight_KC, bias_C, windows_SKC, y_TC, x_step, slot_step, C, K, with_silu};
    int64_t items = (C + CHANNELS - 1) / CHANNELS;
    share(worth(rows->threads, rows->starts_B1[rows->B] * C), rows->B * items, convolve_of, &is);
}

/* A recurrence of all rows.  gates_TH2: of each token and head its decay, and the factor of what its value adds.
   decays_THK: of each number of a key, in place of a head's; NULL for none.
   skip_H: factor of a value that is added to the result; NULL for none. */
typedef struct {
    const Rows *rows;
    const float *q_TC, *k_TC, *v_TC, *gates_TH2, *decays_THK, *skip_H;
    float *matrices_SHKU, *o_THU;
    int64_t C, slot_step, G, H, K, U;
} Terms;

/* Some columns of one head of one row.  m: K rows of them, m_step apart.  count: of the columns. */
typedef struct {
    const float *q, *k, *v, *gates, *decays;
    float *m, *o;
    int64_t m_step, tokens, count;
    float skip;
} Head;

/* Computes the tokens of a row for ``columns`` vectors of a head's columns.  rule: whether a value is added less what
   the matrix gives for its key; if it is 2, each number of a key has a decay.  Each pass over the matrix changes it by a
   token, and reads it for the next one.  Sums are spelt out: copies of this function for chunks and for single tokens
   would round them differently. */
INLINE void advance(const int columns, const int rule, const Terms *is, const Head *head) {
    V known[COLUMNS], found[COLUMNS], added[COLUMNS];
    int64_t K = is->K, step = head->m_step;
    for (int c = 0; c < columns; c++) known[c] = all(0);
    for (int64_t i = 0; i < K && rule; i++) {
        V key = all(rule == 2 ? head->k[i] * head->decays[i] : head->k[i]);
        for (int c = 0; c < columns; c++) known[c] = fused(key, load(head->m + i * step + c * W), known[c]);
    }
    for (int64_t t = 0; t < head->tokens; t++) {
        const float *q = head->q + t * is->C, *k = head->k + t * is->C, *v = head->v + t * is->C;
        const float *next = t + 1 < head->tokens ? k + is->C : k, *gates = head->gates + t * is->H * 2;
        const float *decays = rule == 2 ? head->decays + t * is->H * K : NULL;
        const float *coming = rule == 2 && t + 1 < head->tokens ? decays + is->H * K : decays;
        V decay = all(gates[0]), factor = all(gates[1]);
        for (int c = 0; c < columns; c++) {
            V value = some(v + c * W, head->count - c * W);
            added[c] = (rule == 2 ? value - known[c] : rule ? fused(-decay, known[c], value) : value) * factor;
            found[c] = known[c] = all(0);
        }
        for (int64_t i = 0; i < K; i++) {
            V key = all(k[i]), query = all(q[i]), later = all(rule == 2 ? next[i] * coming[i] : next[i]);
            V kept = rule == 2 ? all(decays[i]) : decay;
            for (int c = 0; c < columns; c++) {
                float *at = head->m + i * step + c * W;
                V cell = fused(key, added[c], load(at) * kept);
                store(at, cell);
                found[c] = fused(query, cell, found[c]);
                if (rule) known[c] = fused(later, cell, known[c]);
            }
        }
        for (int c = 0; c < columns; c++) {
            V value = some(v + c * W, head->count - c * W);
            put(head->o + t * is->H * is->U + c * W, fused(all(head->skip), value, found[c]), head->count - c * W);
        }
    }
}

/* Computes them in memory of their own if more than one token reads them, or if they fill no vectors. */
INLINE void advance_near(const int columns, const int rule, const Terms *is, Head head) {
    if (head.tokens == 1 && head.count >= columns * W) {
        advance(columns, rule, is, &head);
        return;
    }
    float near[is->K * columns * W] __attribute__((aligned(64))), *m = head.m;
    int64_t step = head.m_step;
    for (int64_t i = 0; i < is->K; i++)
        for (int c = 0; c < columns; c++)
            store(near + (i * columns + c) * W, some(m + i * step + c * W, head.count - c * W));
    head.m = near, head.m_step = columns * W;
    advance(columns, rule, is, &head);
    for (int64_t i = 0; i < is->K; i++)
        for (int c = 0; c < columns; c++)
            put(m + i * step + c * W, load(near + (i * columns + c) * W), head.count - c * W);
}

INLINE void advance_item(const int rule, const Terms *is, int64_t item) {
    const Rows *rows = is->rows;
    int64_t H = is->H, K = is->K, U = is->U, items = (U + COLUMNS * W - 1) / (COLUMNS * W);
    int64_t b = item / (H * items), h = item / items % H, first = item % items * COLUMNS * W;
    int64_t last = first + COLUMNS * W < U ? first + COLUMNS * W : U, start = rows->starts_B1[b];
    int64_t key = start * is->C + h / (H / is->G) * K;
    float *m_KU = is->matrices_SHKU + rows->slots_B[b] * is->slot_step + h * K * U;
    for (int64_t i = 0; i < K && rows->fresh_B[b]; i++) memset(m_KU + i * U + first, 0, sizeof(float) * (last - first));
    int wide = last - first > (COLUMNS - 1) * W;
    for (int64_t u = first; u < last; u += wide ? COLUMNS * W : W) {
        Head head = {is->q_TC + key, is->k_TC + key, is->v_TC + start * is->C + h * U + u,
                     is->gates_TH2 + (start * H + h) * 2, rule == 2 ? is->decays_THK + (start * H + h) * K : NULL,
                     m_KU + u, is->o_THU + (start * H + h) * U + u, U, rows->starts_B1[b + 1] - start, last - u,
                     is->skip_H ? is->skip_H[h] : 0};
        if (wide)
            advance_near(COLUMNS, rule, is, head);
        else
            advance_near(1, rule, is, head);
    }
}

static void sum_of(const void *of, int64_t item, int64_t thread) { advance_item(0, of, item); }
static void delta_of(const void *of, int64_t item, int64_t thread) { advance_item(1, of, item); }
static void delta_of_keys_of(const void *of, int64_t item, int64_t thread) { advance_item(2, of, item); }

static void advance_all(Item run, const Terms *is) {
    const Rows *rows = is->rows;
    int64_t items = (is->U + COLUMNS * W - 1) / (COLUMNS * W);
    share(worth(rows->threads, rows->starts_B1[rows->B] * is->H * is->K * is->U), rows->B * is->H * items, run, is);
}

typedef struct {
    float *qkv_TC, *gates_TH2, *decays_THK;
    const float *a_TA, *b_TH, *decay_H, *bias_A;
    int64_t T, a_step, b_step, G, H, K, U;
    float most;
} Sizes;

/* Gives queries and keys of some tokens their length, and computes their gates. */
static void size_of(const void *of, int64_t item, int64_t thread) {
    const Sizes *is = of;
    int64_t G = is->G, H = is->H, K = is->K, C = 2 * G * K + H * is->U;
    EACH_ROW(t, item, ROWS_AT_ONCE(G * K), is->T) {
        for (int64_t g = 0; g < 2 * G; g++) {
            float *x = is->qkv_TC + t * C + g * K, scale = (g < G ? 1 / sqrtf(K) : 1) / sqrtf(squares(x, K) + UNIT_EPS);
            for (int64_t i = 0; i < K; i++) x[i] *= scale;
        }
        for (int64_t h = 0; h < H; h++) {
            const float *a = is->a_TA + t * is->a_step;
            float *gates = is->gates_TH2 + (t * H + h) * 2;
            gates[1] = is->most / (1 + expf(-is->b_TH[t * is->b_step + h]));
            if (!is->decays_THK) gates[0] = expf(is->decay_H[h] * softplus(a[h] + is->bias_A[h]));
            for (int64_t i = 0; i < K && is->decays_THK; i += W) {
                V size = softplus_of(some(a + h * K + i, K - i) + some(is->bias_A + h * K + i, K - i));
                put(is->decays_THK + (t * H + h) * K + i, exponential(size * is->decay_H[h]), K - i);
            }
        }
    }
}

/* qkv_TC: queries and keys get their length here.  gates_TH2: room for what each token's a and b give.
   decays_THK: room for decays of each number of a key; NULL if a head has one. */
void delta(const Rows *rows, float *qkv_TC, const float *a_TA, int64_t a_step, const float *b_TH, int64_t b_step,
           const float *decay_H, const float *bias_A, float most, float *gates_TH2, float *decays_THK,
           float *matrices_SHKU, int64_t slot_step, float *o_THU, int64_t G, int64_t H, int64_t K, int64_t U) {
    int64_t T = rows->starts_B1[rows->B], C = 2 * G * K + H * U;
    Sizes sizes = {qkv_TC, gates_TH2, decays_THK, a_TA, b_TH, decay_H, bias_A, T, a_step, b_step, G, H, K, U, most};
    share(worth(rows->threads, T * G * K), ITEMS(T, ROWS_AT_ONCE(G * K)), size_of, &sizes);
    Terms is = {rows, qkv_TC, qkv_TC + G * K, qkv_TC + 2 * G * K, gates_TH2, decays_THK, NULL, matrices_SHKU, o_THU,
                C, slot_step, G, H, K, U};
    advance_all(decays_THK ? delta_of_keys_of : delta_of, &is);
}

/* xkq_TC: values, keys and queries.  gates_TH2: room for what each token's step size gives, which is at least least. */
void ssd(const Rows *rows, const float *xkq_TC, const float *sizes_TH, int64_t sizes_step, const float *decay_H,
         const float *bias_H, const float *skip_H, float least, float *gates_TH2, float *matrices_SHKU,
         int64_t slot_step, float *o_THU, int64_t G, int64_t H, int64_t K, int64_t U) {
    int64_t T = rows->starts_B1[rows->B], C = 2 * G * K + H * U;
    const float *k_TC = xkq_TC + H * U;
    for (int64_t t = 0; t < T; t++)
        for (int64_t h = 0; h < H; h++) {
            float size = softplus(sizes_TH[t * sizes_step + h] + bias_H[h]);
            if (size < least) size = least;
            gates_TH2[(t * H + h) * 2] = expf(decay_H[h] * size);
            gates_TH2[(t * H + h) * 2 + 1] = size;
        }
    Terms is = {rows, k_TC + G * K, k_TC, xkq_TC, gates_TH2, NULL, skip_H, matrices_SHKU, o_THU, C, slot_step, G, H,
                K, U};
    advance_all(sum_of, &is);
}

typedef struct {
    const float *o_TI, *z_TI, *weight;
    float *out_TI;
    int64_t z_step, weight_step, T, I, N, gated_first, is_sigmoid;
    float eps;
} GatedNorm;

static void gate_norm_of(const void *of, int64_t item, int64_t thread) {
    const GatedNorm *is = of;
    int64_t I = is->I, N = is->N, gated_first = is->gated_first, is_sigmoid = is->is_sigmoid;
    EACH_ROW(t, item, ROWS_AT_ONCE(I), is->T)
        for (int64_t i = 0; i < I; i += N) {
            const float *o = is->o_TI + t * I + i, *z = is->z_TI + t * is->z_step + i;
            const float *factors = is->weight + i / N * is->weight_step;
            float *out = is->out_TI + t * I + i;
            for (int64_t n = 0; n < N; n += W) {
                V x = some(o + n, N - n);
                put(out + n, gated_first ? x * gate_of(some(z + n, N - n), is_sigmoid) : x, N - n);
            }
            V scale = all(is->weight ? 1 / sqrtf(squares(out, N) / N + is->eps) : 1);
            for (int64_t n = 0; n < N; n += W) {
                V x = some(out + n, N - n) * scale;
                if (is->weight) x *= some(factors + n, N - n);
                put(out + n, gated_first ? x : x * gate_of(some(z + n, N - n), is_sigmoid), N - n);
            }
        }
}

/* weight: of N numbers, or of all I, as weight_step says; NULL for no norm.  o_TI may be out_TI. */
void gate_norm(const float *o_TI, const float *z_TI, int64_t z_step, const float *weight, int64_t weight_step,
               float *out_TI, int64_t T, int64_t I, int64_t N, float eps, int64_t gated_first,
               int64_t is_sigmoid, int64_t threads) {
    GatedNorm is = {o_TI, z_TI, weight, out_TI, z_step, weight_step, T, I, N, gated_first, is_sigmoid, eps};
    share(worth(threads, T * I), ITEMS(T, ROWS_AT_ONCE(I)), gate_norm_of, &is);
}

const Recurrences RECURRENCES = {convolve, delta, ssd, gate_norm};
