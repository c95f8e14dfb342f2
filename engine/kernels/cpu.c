/* What stands between the products of a small model on a CPU, each as one pass over float32 rows by one thread.
   engine/kernels/cpu.py compiles and calls them; each computes what the method of its name says.

   Legend: T tokens, D model dim, A query, key and value heads, Q query heads, G key/value heads, H head size. */

#include <math.h>
#include <stdint.h>
#include <string.h>

static float scale_of(const float *x, int64_t size, float eps) {
    float sum = 0;
    for (int64_t i = 0; i < size; i++) sum += x[i] * x[i];
    return 1 / sqrtf(sum / size + eps);
}

void add_norm(float *x_TD, const float *update_TD, const float *weight_D, float *out_TD, int64_t T, int64_t D,
              float eps) {
    for (int64_t t = 0; t < T; t++) {
        float *x = x_TD + t * D, *restrict out = out_TD + t * D;
        const float *restrict update = update_TD + t * D;
        for (int64_t i = 0; i < D; i++) x[i] += update[i];
        float scale = scale_of(x, D, eps);
        for (int64_t i = 0; i < D; i++) out[i] = x[i] * scale * weight_D[i];
    }
}

/* weight_RH: of each query and key head; NULL if heads are not normalised.  angles_TH: cosines, then sines.
   S: slots that there are.  Returns the first token whose slot is none of them, before anything is written, or -1. */
int64_t rotate_and_store(const float *qkv_TAH, const float *weight_RH, const float *angles_TH,
                         const int64_t *slots_T, float *q_TQH, float *keys_SGH, float *values_SGH, int64_t T, int64_t Q, int64_t G, int64_t H,
                         int64_t S, float eps) {
    for (int64_t t = 0; t < T; t++)
        if (slots_T[t] >= S) return t;
    int64_t half = H / 2, rotated = Q + G;
    for (int64_t t = 0; t < T; t++) {
        const float *heads = qkv_TAH + t * (rotated + G) * H, *restrict cosine = angles_TH + t * H,
                    *restrict sine = cosine + half;
        float *key = keys_SGH + slots_T[t] * G * H;
        for (int64_t r = 0; r < rotated; r++) {
            if (r >= Q && slots_T[t] < 0) break;
            const float *restrict x = heads + r * H, *restrict weight = weight_RH + r * H;
            float *restrict out = r < Q ? q_TQH + (t * Q + r) * H : key + (r - Q) * H;
            float scale = weight_RH ? scale_of(x, H, eps) : 1;
            for (int64_t i = 0; i < half; i++) {
                float left = x[i] * scale, right = x[i + half] * scale;
                if (weight_RH) left *= weight[i], right *= weight[i + half];
                out[i] = left * cosine[i] - right * sine[i];
                out[i + half] = right * cosine[i] + left * sine[i];
            }
        }
        if (slots_T[t] >= 0)
            memcpy(values_SGH + slots_T[t] * G * H, heads + rotated * H, sizeof(float) * G * H);
    }
    return -1;
}

/* e to the x, which is at most 0; to the -87, above the least normal number, where x is less.  NaN stays NaN. */
static inline float exp_below_one(float x) {
    x = x < -87.0f ? -87.0f : x;
    float whole = rintf(x * 1.44269504f), rest = x - whole * 0.693145752f - whole * 1.42860677e-6f;
    float sum = 1 / 5040.0f;
    sum = sum * rest + 1 / 720.0f;
    sum = sum * rest + 1 / 120.0f;
    sum = sum * rest + 1 / 24.0f;
    sum = sum * rest + 1 / 6.0f;
    sum = sum * rest + 0.5f;
    sum = sum * rest + 1;
    sum = sum * rest + 1;
    int32_t bits = ((int32_t)whole + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return sum * power;
}

/* B decode rows, P pages of a row, L keys that one sees.  scores_QL: to work in.
   num_pages: that there are.  page_stride: from the first slot of a page to that of the next. */
typedef struct {
    const int32_t *pages_BP, *lengths_B;
    float *scores_QL;
    int64_t B, P, L, Q, G, H, page_size, page_stride, num_pages;
    float scale;
} Decoding;

static inline __attribute__((always_inline)) void attend_row(
    const Decoding *is, const float *q_QH, const float *keys_SGH, const float *values_SGH, float *restrict out_QH,
    const int32_t *pages_P, int64_t first, int64_t length, int64_t H) {
    int64_t Q = is->Q, heads = Q / is->G, D = is->G * H, size = is->page_size, last;
    float *scores_QL = is->scores_QL, highest_Q[Q];
    for (int64_t h = 0; h < Q; h++) highest_Q[h] = -INFINITY;
    for (int64_t l = first; l < length; l = last) {
        const float *key = keys_SGH + (pages_P[l / size] * is->page_stride + l % size) * D;
        last = l - l % size + size < length ? l - l % size + size : length;
        for (int64_t at = l; at < last; at++, key += D)
            for (int64_t h = 0; h < Q; h++) {
                const float *restrict q = q_QH + h * H, *restrict k = key + h / heads * H;
                float score = 0;
                for (int64_t i = 0; i < H; i++) score += q[i] * k[i];
                scores_QL[h * is->L + at - first] = score *= is->scale;
                if (score > highest_Q[h]) highest_Q[h] = score;
            }
    }
    for (int64_t h = 0; h < Q; h++) {
        float *restrict scores = scores_QL + h * is->L, highest = highest_Q[h], sum = 0;
        for (int64_t l = 0; l < length - first; l++) sum += scores[l] = exp_below_one(scores[l] - highest);
        sum = 1 / sum;
        for (int64_t l = 0; l < length - first; l++) scores[l] *= sum;
    }
    memset(out_QH, 0, sizeof(float) * Q * H);
    for (int64_t l = first; l < length; l = last) {
        const float *value = values_SGH + (pages_P[l / size] * is->page_stride + l % size) * D;
        last = l - l % size + size < length ? l - l % size + size : length;
        int64_t at = l;
        for (; at + 4 <= last; at += 4, value += 4 * D)
            for (int64_t h = 0; h < Q; h++) {
                const float *restrict v = value + h / heads * H, *w = scores_QL + h * is->L + at - first;
                float *restrict out = out_QH + h * H, w0 = w[0], w1 = w[1], w2 = w[2], w3 = w[3];
                for (int64_t i = 0; i < H; i++)
                    out[i] += (w0 * v[i] + w1 * v[i + D]) + (w2 * v[i + 2 * D] + w3 * v[i + 3 * D]);
            }
        for (; at < last; at++, value += D)
            for (int64_t h = 0; h < Q; h++) {
                const float *restrict v = value + h / heads * H;
                float *restrict out = out_QH + h * H, weight = scores_QL[h * is->L + at - first];
                for (int64_t i = 0; i < H; i++) out[i] += weight * v[i];
            }
    }
}

/* window: how many keys back a query sees, 0 for all.  Returns the first row with a page or a length that cannot be,
   whose result is not written, or -1. */
int64_t attend_decodes(const Decoding *is, const float *q_BQH, const float *keys_SGH, const float *values_SGH,
                       float *out_BQH, int64_t window) {
    for (int64_t b = 0; b < is->B; b++) {
        const int32_t *pages_P = is->pages_BP + b * is->P;
        int64_t length = is->lengths_B[b], first = window && length > window ? length - window : 0;
        if (length > is->P * is->page_size || length - first > is->L) return b;
        for (int64_t p = first / is->page_size; p * is->page_size < length; p++)
            if (pages_P[p] < 0 || pages_P[p] >= is->num_pages) return b;
        const float *q_QH = q_BQH + b * is->Q * is->H;
        float *out_QH = out_BQH + b * is->Q * is->H;
        if (is->H == 64)
            attend_row(is, q_QH, keys_SGH, values_SGH, out_QH, pages_P, first, length, 64);
        else if (is->H == 128)
            attend_row(is, q_QH, keys_SGH, values_SGH, out_QH, pages_P, first, length, 128);
        else
            attend_row(is, q_QH, keys_SGH, values_SGH, out_QH, pages_P, first, length, is->H);
    }
    return -1;
}
