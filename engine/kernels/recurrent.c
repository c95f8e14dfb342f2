/* What recurrent layers compute between their products on a CPU: a causal convolution, the gated delta rule, Mamba 2,
   and the norm and gate behind these.  engine/kernels/recurrent.py calls these functions and documents them.

   The tokens of a row are computed one after another, in prompts as in decodes, and each number is a sum of one order.
   So a result depends only on a row's tokens so far: not on the chunk that they came in, other rows, or threads.  Some
   columns of a head's matrix depend on no others; a prompt keeps as many of them as fit into the first cache.

   Legend: T tokens, B rows, S slots, C channels, K taps or size of a key, U size of a value, G heads with a key,
   H heads with a value, N numbers of a group. */

#include <math.h>
#include <string.h>

#include "cpu.h"
#include "lanes.h"

#define CHANNELS 512        /* that one item convolves */
#define COLUMNS 4           /* vectors of a matrix's columns that are computed together */
#define WORTH_THREADS 32768 /* numbers below which waking a thread takes longer than it saves */
#define UNIT_EPS 1e-6f      /* added to the squared length of queries and keys */
#define PARALLEL(numbers) num_threads(rows->threads) if (rows->threads > 1 && (numbers) > WORTH_THREADS)

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

/* Where input ``at`` of a row is, the first of its window being 0. */
INLINE const float *input(const float *window, const float *x_TC, int64_t x_step, int64_t C, int64_t K, int64_t at) {
    return at < K - 1 ? window + at * C : x_TC + (at - (K - 1)) * x_step;
}

/* bias_C: NULL for none.  windows_SKC: K - 1 inputs of each slot.  silu: whether it follows. */
void convolve(const Rows *rows, const float *x_TC, int64_t x_step, const float *weight_KC, const float *bias_C,
              float *windows_SKC, int64_t slot_step, float *y_TC, int64_t C, int64_t K, int64_t with_silu) {
    int64_t items = (C + CHANNELS - 1) / CHANNELS;
#pragma omp parallel for schedule(dynamic) PARALLEL(rows->starts_B1[rows->B] * C)
    for (int64_t item = 0; item < rows->B * items; item++) {
        int64_t b = item / items, first = item % items * CHANNELS, last = first + CHANNELS < C ? first + CHANNELS : C;
        int64_t start = rows->starts_B1[b], tokens = rows->starts_B1[b + 1] - start, bytes = sizeof(float) * (last - first);
        float *window = windows_SKC + rows->slots_B[b] * slot_step;
        const float *x = x_TC + start * x_step;
        for (int64_t k = 0; k < K - 1 && rows->fresh_B[b]; k++) memset(window + k * C + first, 0, bytes);
        for (int64_t t = 0; t < tokens; t++)
            for (int64_t c = first; c < last; c += W) {
                V sum = {0};
                for (int64_t k = 0; k < K; k++)
                    sum += some(weight_KC + k * C + c, last - c) * some(input(window, x, x_step, C, K, t + k) + c, last - c);
                if (bias_C) sum += some(bias_C + c, last - c);
                put(y_TC + (start + t) * C + c, with_silu ? silu(sum) : sum, last - c);
            }
        for (int64_t k = 0; k < K - 1; k++)
            memcpy(window + k * C + first, input(window, x, x_step, C, K, tokens + k) + first, bytes);
    }
}

/* A recurrence of all rows.  gates_TH2: of each token and head its decay, and the factor of what its value adds.
   skip_H: factor of a value that is added to the result; NULL for none. */
typedef struct {
    const float *q_TC, *k_TC, *v_TC, *gates_TH2, *skip_H;
    float *matrices_SHKU, *o_THU;
    int64_t C, slot_step, G, H, K, U;
} Terms;

/* Some columns of one head of one row.  m: K rows of them, m_step apart.  count: of the columns. */
typedef struct {
    const float *q, *k, *v, *gates;
    float *m, *o;
    int64_t m_step, tokens, count;
    float skip;
} Head;

/* Computes the tokens of a row for ``columns`` vectors of a head's columns.  rule: whether a value is added less what
   the matrix gives for its key.  Each pass over the matrix changes it by a token, and reads it for the next one. */
INLINE void advance(const int columns, const int rule, const Terms *is, const Head *head) {
    V known[COLUMNS], found[COLUMNS], added[COLUMNS];
    int64_t K = is->K, step = head->m_step;
    for (int c = 0; c < columns; c++) known[c] = all(0);
    for (int64_t i = 0; i < K && rule; i++) {
        V key = all(head->k[i]);
        for (int c = 0; c < columns; c++) known[c] += key * load(head->m + i * step + c * W);
    }
    for (int64_t t = 0; t < head->tokens; t++) {
        const float *q = head->q + t * is->C, *k = head->k + t * is->C, *v = head->v + t * is->C;
        const float *next = t + 1 < head->tokens ? k + is->C : k, *gates = head->gates + t * is->H * 2;
        V decay = all(gates[0]), factor = all(gates[1]);
        for (int c = 0; c < columns; c++) {
            V value = some(v + c * W, head->count - c * W);
            added[c] = (rule ? value - decay * known[c] : value) * factor;
            found[c] = known[c] = all(0);
        }
        for (int64_t i = 0; i < K; i++) {
            V key = all(k[i]), query = all(q[i]), later = all(next[i]);
            for (int c = 0; c < columns; c++) {
                float *at = head->m + i * step + c * W;
                V cell = load(at) * decay;
                cell += key * added[c];
                store(at, cell);
                found[c] += query * cell;
                if (rule) known[c] += later * cell;
            }
        }
        for (int c = 0; c < columns; c++) {
            V value = some(v + c * W, head->count - c * W);
            put(head->o + t * is->H * is->U + c * W, found[c] + head->skip * value, head->count - c * W);
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

INLINE void advance_all(const int rule, const Rows *rows, const Terms *is) {
    int64_t H = is->H, K = is->K, U = is->U, items = (U + COLUMNS * W - 1) / (COLUMNS * W);
#pragma omp parallel for schedule(dynamic) PARALLEL(rows->starts_B1[rows->B] * H * K * U)
    for (int64_t item = 0; item < rows->B * H * items; item++) {
        int64_t b = item / (H * items), h = item / items % H, first = item % items * COLUMNS * W;
        int64_t last = first + COLUMNS * W < U ? first + COLUMNS * W : U, start = rows->starts_B1[b];
        int64_t key = start * is->C + h / (H / is->G) * K;
        float *m_KU = is->matrices_SHKU + rows->slots_B[b] * is->slot_step + h * K * U;
        for (int64_t i = 0; i < K && rows->fresh_B[b]; i++)
            memset(m_KU + i * U + first, 0, sizeof(float) * (last - first));
        int wide = last - first > (COLUMNS - 1) * W;
        for (int64_t u = first; u < last; u += wide ? COLUMNS * W : W) {
            Head head = {is->q_TC + key, is->k_TC + key, is->v_TC + start * is->C + h * U + u,
                         is->gates_TH2 + (start * H + h) * 2, m_KU + u, is->o_THU + (start * H + h) * U + u, U,
                         rows->starts_B1[b + 1] - start, last - u, is->skip_H ? is->skip_H[h] : 0};
            if (wide)
                advance_near(COLUMNS, rule, is, head);
            else
                advance_near(1, rule, is, head);
        }
    }
}

/* qkv_TC: queries and keys get their length here.  gates_TH2: room for what each token's a and b give. */
void delta(const Rows *rows, float *qkv_TC, const float *a_TH, int64_t a_step, const float *b_TH, int64_t b_step,
           const float *decay_H, const float *bias_H, float most, float *gates_TH2, float *matrices_SHKU,
           int64_t slot_step, float *o_THU, int64_t G, int64_t H, int64_t K, int64_t U) {
    int64_t T = rows->starts_B1[rows->B], C = 2 * G * K + H * U;
#pragma omp parallel for PARALLEL(T * G * K)
    for (int64_t t = 0; t < T; t++) {
        for (int64_t g = 0; g < 2 * G; g++) {
            float *x = qkv_TC + t * C + g * K, scale = (g < G ? 1 / sqrtf(K) : 1) / sqrtf(squares(x, K) + UNIT_EPS);
            for (int64_t i = 0; i < K; i++) x[i] *= scale;
        }
        for (int64_t h = 0; h < H; h++) {
            float *gates = gates_TH2 + (t * H + h) * 2;
            gates[0] = expf(decay_H[h] * softplus(a_TH[t * a_step + h] + bias_H[h]));
            gates[1] = most / (1 + expf(-b_TH[t * b_step + h]));
        }
    }
    Terms is = {qkv_TC, qkv_TC + G * K, qkv_TC + 2 * G * K, gates_TH2, NULL, matrices_SHKU, o_THU, C, slot_step, G, H, K, U};
    advance_all(1, rows, &is);
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
    Terms is = {k_TC + G * K, k_TC, xkq_TC, gates_TH2, skip_H, matrices_SHKU, o_THU, C, slot_step, G, H, K, U};
    advance_all(0, rows, &is);
}

/* weight: of N numbers, or of all I, as weight_step says; NULL for no norm.  o_TI may be out_TI. */
void gate_norm(const float *o_TI, const float *z_TI, int64_t z_step, const float *weight, int64_t weight_step,
               float *out_TI, int64_t T, int64_t I, int64_t N, float eps, int64_t gated_first,
               int64_t is_sigmoid, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && T * I > WORTH_THREADS)
    for (int64_t t = 0; t < T; t++)
        for (int64_t i = 0; i < I; i += N) {
            const float *o = o_TI + t * I + i, *z = z_TI + t * z_step + i, *factors = weight + i / N * weight_step;
            float *out = out_TI + t * I + i;
            for (int64_t n = 0; n < N; n += W) {
                V x = some(o + n, N - n);
                put(out + n, gated_first ? x * gate_of(some(z + n, N - n), is_sigmoid) : x, N - n);
            }
            V scale = all(weight ? 1 / sqrtf(squares(out, N) / N + eps) : 1);
            for (int64_t n = 0; n < N; n += W) {
                V x = some(out + n, N - n) * scale;
                if (weight) x *= some(factors + n, N - n);
                put(out + n, gated_first ? x : x * gate_of(some(z + n, N - n), is_sigmoid), N - n);
            }
        }
}
