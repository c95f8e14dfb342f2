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
