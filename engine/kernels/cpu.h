/* Functions that the sources of this folder call of each other; each source documents its own. */

#include <stdint.h>

/* A weight in a layout of its product: of products.c, or of blocks.c, whose rows can also be read. */
typedef struct Weight Weight;
struct Weight {
    const void *panels;
    int64_t O, I, kind;
    int64_t (*product)(const Weight *weight, const float *x_TI, int64_t x_step, const float *bias_O, float *y_TO,
                       int64_t T, int64_t threads);
    void (*rows)(const Weight *weight, const int64_t *outputs_T, float *out_TI, int64_t T);
};

/* team.c */
typedef void (*Item)(const void *of, int64_t item, int64_t thread);
void together(int64_t threads, void (*whole)(void *of), void *of);
void share(int64_t threads, int64_t count, Item run, const void *of);
int64_t worth(int64_t threads, int64_t numbers);
/* Rows that are one item of a loop, if a row has so many numbers; for rows first:last of T rows. */
#define ROWS_AT_ONCE(numbers) ((numbers) < 4096 ? 4096 / ((numbers) + 1) + 1 : 1)
#define EACH_ROW(t, item, at_once, T) \
    for (int64_t t = (item) * (at_once); t < ((item) + 1) * (at_once) && t < (T); t++)
#define ITEMS(T, at_once) (((T) + (at_once) - 1) / (at_once))

/* cpu.c */
void add_norm(float *x_TD, const float *update_TD, const float *weight_D, float *out_TD, int64_t T, int64_t D,
              float eps, int64_t threads);
void turn(const int64_t *positions_T, const float *frequencies_R, float *angles_TH, int64_t T, int64_t R, float scale,
          int64_t threads);
int64_t rotate_and_store(const float *qkv_TAH, const float *weight_RH, const float *angles_TP, const int64_t *slots_T,
                         float *q_TQH, float *keys_SGH, float *values_SGH, int64_t T, int64_t Q, int64_t G, int64_t H,
                         int64_t pairs, int64_t S, float eps, int64_t threads);
void gate(const float *gate_up_T2I, float *out_TI, int64_t T, int64_t I, int64_t threads);

/* attention.c.  A step, for all of its layers.
   items_I2: (sequence, number of a group of ROWS of its rows); each item is computed for all G.
   query_starts_B1: index in T of each sequence's first query.  num_pages: pages of the pool.
   page_stride: distance of the first slots of two successive pages.  scratch: ``attention_scratch`` for each thread.
   together: whether one thread computes all G of an item with at most ROWS rows in total, as these are contiguous.
   worth: number of products of a layer from which on several threads compute it. */
typedef struct {
    const int32_t *pages_BP, *lengths_B, *query_starts_B1, *items_I2;
    float *scratch;
    int64_t B, P, I, Q, G, H, page_size, page_stride, num_pages, threads, together, worth;
    float scale;
} Attention;

void attend(const Attention *is, const float *q_TQH, const float *keys_SGH, const float *values_SGH, float *out_TQH,
            int64_t window);
int64_t attention_plan(Attention *is, int64_t window, int64_t threads, int32_t *items_I2, int64_t room);

/* recurrent.c.  The rows of a step: each has a slot, and tokens from one start to the next.  fresh_B: whether a row has
   no tokens before these, so that the content of its slot counts as zeros. */
typedef struct {
    const int64_t *slots_B;
    const int32_t *starts_B1, *fresh_B;
    int64_t B, threads;
} Rows;

void convolve(const Rows *rows, const float *x_TC, int64_t x_step, const float *weight_KC, const float *bias_C,
              float *windows_SKC, int64_t slot_step, float *y_TC, int64_t C, int64_t K, int64_t with_silu);
void delta(const Rows *rows, float *qkv_TC, const float *a_TA, int64_t a_step, const float *b_TH, int64_t b_step,
           const float *decay_H, const float *bias_A, float most, float *gates_TH2, float *decays_THK,
           float *matrices_SHKU, int64_t slot_step, float *o_THU, int64_t G, int64_t H, int64_t K, int64_t U);
void ssd(const Rows *rows, const float *xkq_TC, const float *sizes_TH, int64_t sizes_step, const float *decay_H,
         const float *bias_H, const float *skip_H, float least, float *gates_TH2, float *matrices_SHKU,
         int64_t slot_step, float *o_THU, int64_t G, int64_t H, int64_t K, int64_t U);
void gate_norm(const float *o_TI, const float *z_TI, int64_t z_step, const float *weight, int64_t weight_step,
               float *out_TI, int64_t T, int64_t I, int64_t N, float eps, int64_t gated_first,
               int64_t is_sigmoid, int64_t threads);
/* These four, for decodes.c: few models need them, so they may be in another library. */
typedef struct {
    __typeof__(convolve) *convolve;
    __typeof__(delta) *delta;
    __typeof__(ssd) *ssd;
    __typeof__(gate_norm) *gate_norm;
} Recurrences;

/* draw.c */
void likeliest(const float *logits_nN, int64_t *token_ids_n, int64_t n, int64_t N, int64_t threads);
