/* A small model's operations between the products on a CPU, each in one pass over float32 rows.
   engine/kernels/cpu.py calls these functions and documents them.  A row depends on no other row.

   Legend: T tokens, D model dim, A query, key and value heads, Q query heads, G key/value heads, H head size,
   I intermediate size. */

#include <math.h>
#include <string.h>

#include "cpu.h"

static float scale_of(const float *x, int64_t size, float eps) {
    float sum = 0;
    for (int64_t i = 0; i < size; i++) sum += x[i] * x[i];
    return 1 / sqrtf(sum / size + eps);
}

typedef struct {
    float *x_TD;
    const float *update_TD, *weight_D;
    float *out_TD;
    int64_t T, D;
    float eps;
} Norms;

static void add_norm_of(const void *of, int64_t item, int64_t thread) {
    const Norms *is = of;
    int64_t D = is->D;
    EACH_ROW(t, item, ROWS_AT_ONCE(D), is->T) {
        float *x = is->x_TD + t * D, *restrict out = is->out_TD + t * D;
        if (is->update_TD) {
            const float *restrict update = is->update_TD + t * D;
            for (int64_t i = 0; i < D; i++) x[i] += update[i];
        }
        float scale = scale_of(x, D, is->eps);
        for (int64_t i = 0; i < D; i++) out[i] = x[i] * scale * is->weight_D[i];
    }
}

/* update_TD: NULL to add nothing. */
void add_norm(float *x_TD, const float *update_TD, const float *weight_D, float *out_TD, int64_t T, int64_t D,
              float eps, int64_t threads) {
    Norms is = {x_TD, update_TD, weight_D, out_TD, T, D, eps};
    share(worth(threads, T * D), ITEMS(T, ROWS_AT_ONCE(D)), add_norm_of, &is);
}

typedef struct {
    const int64_t *positions_T;
    const float *frequencies_R;
    float *angles_TH;
    int64_t T, R;
    float scale;
} Turns;

#define NUMBERS_OF_AN_ANGLE 16 /* a cosine and a sine take as long as so many products */

static void turn_of(const void *of, int64_t item, int64_t thread) {
    const Turns *is = of;
    int64_t R = is->R;
    EACH_ROW(t, item, ROWS_AT_ONCE(R * NUMBERS_OF_AN_ANGLE), is->T)
        for (int64_t i = 0; i < R; i++) {
            float angle = is->positions_T[t] * is->frequencies_R[i];
            is->angles_TH[2 * t * R + i] = cosf(angle) * is->scale;
            is->angles_TH[2 * t * R + R + i] = sinf(angle) * is->scale;
        }
}

/* R cosines of each position, then R sines. */
void turn(const int64_t *positions_T, const float *frequencies_R, float *angles_TH, int64_t T, int64_t R, float scale,
          int64_t threads) {
    Turns is = {positions_T, frequencies_R, angles_TH, T, R, scale};
    int64_t numbers = R * NUMBERS_OF_AN_ANGLE;
    share(worth(threads, T * numbers), ITEMS(T, ROWS_AT_ONCE(numbers)), turn_of, &is);
}

typedef struct {
    const float *qkv_TAH, *weight_RH, *angles_TP;
    const int64_t *slots_T;
    float *q_TQH, *keys_SGH, *values_SGH;
    int64_t T, Q, G, H, pairs;
    float eps;
} Heads;

static void rotate_and_store_of(const void *of, int64_t item, int64_t thread) {
    const Heads *is = of;
    const int64_t *slots_T = is->slots_T;
    int64_t Q = is->Q, G = is->G, H = is->H, pairs = is->pairs, rotated = Q + G;
    EACH_ROW(t, item, ROWS_AT_ONCE(rotated * H), is->T) {
        const float *heads = is->qkv_TAH + t * (rotated + G) * H, *restrict cosine = is->angles_TP + t * 2 * pairs,
                    *restrict sine = cosine + pairs;
        float *key = is->keys_SGH + slots_T[t] * G * H;
        for (int64_t r = 0; r < rotated; r++) {
            if (r >= Q && slots_T[t] < 0) break;
            const float *restrict x = heads + r * H, *restrict weight = is->weight_RH + r * H;
            float *restrict out = r < Q ? is->q_TQH + (t * Q + r) * H : key + (r - Q) * H;
            float scale = is->weight_RH ? scale_of(x, H, is->eps) : 1;
            for (int64_t i = 0; i < pairs; i++) {
                float left = x[i] * scale, right = x[i + pairs] * scale;
                if (is->weight_RH) left *= weight[i], right *= weight[i + pairs];
                out[i] = left * cosine[i] - right * sine[i];
                out[i + pairs] = right * cosine[i] + left * sine[i];
            }
            for (int64_t i = 2 * pairs; i < H; i++) out[i] = is->weight_RH ? x[i] * scale * weight[i] : x[i];
        }
        if (slots_T[t] >= 0)
            memcpy(is->values_SGH + slots_T[t] * G * H, heads + rotated * H, sizeof(float) * G * H);
    }
}

/* weight_RH: of each query and key head; NULL if heads are not normalised.  angles_TP: cosines, then sines.
   pairs: of the first numbers of a head that are turned, half of H at most; 0 for none.
   S: slots of the pool.  Returns the first token whose slot does not exist, before anything is written, or -1. */
int64_t rotate_and_store(const float *qkv_TAH, const float *weight_RH, const float *angles_TP,
                         const int64_t *slots_T, float *q_TQH, float *keys_SGH, float *values_SGH, int64_t T,
                         int64_t Q, int64_t G, int64_t H, int64_t pairs, int64_t S, float eps, int64_t threads) {
    for (int64_t t = 0; t < T; t++)
        if (slots_T[t] >= S) return t;
    Heads is = {qkv_TAH, weight_RH, angles_TP, slots_T, q_TQH, keys_SGH, values_SGH, T, Q, G, H, pairs, eps};
    int64_t numbers = (Q + G) * H;
    share(worth(threads, T * numbers), ITEMS(T, ROWS_AT_ONCE(numbers)), rotate_and_store_of, &is);
    return -1;
}

/* e to the x, for x of at most 0; below -87, e to the -87, which is above the smallest normal number.  NaN stays NaN. */
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
    int32_t bits = (int32_t)(whole > -127 ? whole + 127 : 0) << 23; /* NaN has no integer, so it becomes 0 here */
    float power;
    memcpy(&power, &bits, sizeof power);
    return sum * power;
}

typedef struct {
    const float *gate_up_T2I;
    float *out_TI;
    int64_t T, I;
} Gates;

static void gate_of(const void *of, int64_t item, int64_t thread) {
    const Gates *is = of;
    int64_t I = is->I;
    EACH_ROW(t, item, ROWS_AT_ONCE(I), is->T) {
        const float *restrict x = is->gate_up_T2I + 2 * t * I, *restrict y = x + I;
        float *restrict out = is->out_TI + t * I;
        for (int64_t i = 0; i < I; i++) {
            float power = exp_below_one(-fabsf(x[i]));
            out[i] = x[i] * (x[i] >= 0 ? 1 : power) / (1 + power) * y[i];
        }
    }
}

/* silu(x) * y of merged gates and ups. */
void gate(const float *gate_up_T2I, float *out_TI, int64_t T, int64_t I, int64_t threads) {
    Gates is = {gate_up_T2I, out_TI, T, I};
    share(worth(threads, T * I), ITEMS(T, ROWS_AT_ONCE(I)), gate_of, &is);
}
