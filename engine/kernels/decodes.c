/* A decode step of a model in one call, from the rows' tokens and pages to logits, and to the next token if every row
   takes its likeliest.  It does layer by layer what engine/execution/runner.py does with engine/models/decoder.py.
   engine/execution/compiled_decodes.py describes a model to it.

   Legend: B decode rows, D model dim, A query, key and value heads, R query and key heads or rotated pairs of a head,
   Q query heads, G key/value heads, H head size, P pages of the longest row, J items of attention, I intermediate
   features, V vocabulary, S slots of the pool, N rows of the engine, M tokens and W pages that a row has room for.
   Of a recurrent part: C channels and K taps of its convolution or K size of a key, U size of a value, O outputs of
   its first product, F inputs of its last one. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cpu.h"

enum { CONVOLUTION, DELTA, SSD };

static const Recurrences *recur; /* of recurrent parts and gates of attention */

/* Models that have these are computed with these functions from now on. */
void give_recurrences(const Recurrences *from) { recur = from; }

/* A recurrent part, between the products of its layer.  Pointers are as in ``cpu.h``, for all rows of the engine: a
   row's slot has its number.  most: also the least step size of Mamba 2.  norm_step: numbers of ``norm`` for a group of
   ``of_group``. */
typedef struct {
    const float *taps_KC, *bias_C, *decay_H, *bias_H, *skip_H, *norm;
    float *windows_NKC, *matrices_NHKU;
    int64_t kind, C, taps, G, H, K, U, slot_step, of_group, norm_step, gated_first;
    float most, eps;
} Recurrent;

/* inner, outer: the products before and behind attention, or a recurrent part, which is NULL for attention.  heads_RH:
   norm weights of each query and key head; NULL for none.  Biases may be NULL, too.  attention_gate: its O is 0 for none.
   frequencies_R: NULL for a layer without positions.  Scales are factors of what the residual stream gets. */
typedef struct {
    const float *before_attention_D, *heads_RH, *before_mlp_D;
    Weight inner, outer, gate_up, down, attention_gate;
    const float *inner_bias, *outer_bias, *gate_up_bias, *down_bias, *gate_bias;
    const Recurrent *recurrent;
    float *keys_SGH, *values_SGH;
    const float *frequencies_R;
    int64_t window, pairs;
    float attention_eps, heads_eps, mlp_eps, angle_scale, mixed_scale, mlp_scale;
} Layer;

/* embedding_VD: NULL if the rows of ``table`` are the embedding.  tokens_NM, pages_NW: of all rows, kept between steps.  attention: the fields that are the same in every step.
   widest: window of the layer that sees most, 0 for all.  most_*: of all layers, of a row: numbers between the two
   products of a first half, of its first product, of channels, and of heads with a value. */
typedef struct {
    const Layer *layers;
    const float *embedding_VD, *norm_D;
    Weight table, head;
    const Attention *attention;
    int32_t *tokens_NM;
    const int32_t *pages_NW;
    int64_t num_layers, V, D, I, S, N, M, W, widest, most_mixed, most_inner, most_channels, most_heads;
    float embedding_scale, norm_eps, logit_scale;
} Decoder;

enum { DONE, NO_MEMORY, WRONG_TOKEN, WRONG_ROW };

/* Memory of a step, one block.  pages_BP, items_J2: as in ``Attention``.  gate_up_B2I: merged.  inner_BO: of the first
   product, mixed_BF: what the last one reads.  fresh_B: rows that have no token before the step's. */
typedef struct {
    int64_t *positions_B, *slots_B;
    int32_t *starts_B1, *pages_BP, *items_J2, *fresh_B;
    float *x_BD, *normed_BD, *update_BD, *inner_BO, *q_BQH, *mixed_BF, *angles_BH, *gate_up_B2I, *gated_BI;
    float *channels_BC, *gates_BH2;
} Memory;

static int64_t multiply(const Weight *weight, const float *x_TI, int64_t x_step, const float *bias_O, float *y_TO,
                        int64_t T, int64_t threads) {
    return weight->product(weight, x_TI, x_step, bias_O, y_TO, T, threads);
}

static void scale(float *x, int64_t count, float factor) {
    for (int64_t i = 0; i < count && factor != 1; i++) x[i] *= factor;
}

/* Attends: from inner_BO to mixed_BF.  Returns the first row whose slot does not exist, or -1. */
static int64_t attend_rows(const Decoder *is, const Layer *layer, const Attention *rows, const Memory *in,
                           int64_t threads) {
    int64_t B = rows->B, Q = rows->Q, G = rows->G, H = rows->H;
    int64_t wrong = rotate_and_store(in->inner_BO, layer->heads_RH, in->angles_BH, in->slots_B, in->q_BQH,
                                     layer->keys_SGH, layer->values_SGH, B, Q, G, H, layer->pairs, is->S,
                                     layer->heads_eps, threads);
    if (wrong < 0) attend(rows, in->q_BQH, layer->keys_SGH, layer->values_SGH, in->mixed_BF, layer->window);
    return wrong;
}

/* Advances the states of the rows by a token: from inner_BO to mixed_BF.  rows_B: also their slots. */
static void advance_rows(const Layer *layer, const int64_t *rows_B, int64_t B, const Memory *in, int64_t threads) {
    const Recurrent *is = layer->recurrent;
    const float *x = in->inner_BO;
    int64_t O = layer->inner.O, F = layer->outer.I, C = is->C;
    Rows rows = {rows_B, in->starts_B1, in->fresh_B, B, threads};
    if (is->kind == CONVOLUTION) {
        float *channels = in->channels_BC;
        for (int64_t b = 0; b < B; b++)
            for (int64_t c = 0; c < C; c++) channels[b * C + c] = x[b * O + c] * x[b * O + 2 * C + c];
        recur->convolve(&rows, channels, C, is->taps_KC, is->bias_C, is->windows_NKC, is->slot_step, in->mixed_BF, C,
                        is->taps, 0);
        for (int64_t b = 0; b < B; b++)
            for (int64_t c = 0; c < C; c++) in->mixed_BF[b * C + c] *= x[b * O + C + c];
        return;
    }
    int is_delta = is->kind == DELTA;
    const float *z = is_delta ? x + C : x, *sizes = x + C + F;
    recur->convolve(&rows, is_delta ? x : x + F, O, is->taps_KC, is->bias_C, is->windows_NKC, is->slot_step,
                    in->channels_BC, C, is->taps, 1);
    if (is_delta)
        recur->delta(&rows, in->channels_BC, sizes + is->H, O, sizes, O, is->decay_H, is->bias_H, is->most,
                     in->gates_BH2, NULL, is->matrices_NHKU, is->slot_step, in->mixed_BF, is->G, is->H, is->K, is->U);
    else
        recur->ssd(&rows, in->channels_BC, sizes, O, is->decay_H, is->bias_H, is->skip_H, is->most, in->gates_BH2,
                   is->matrices_NHKU, is->slot_step, in->mixed_BF, is->G, is->H, is->K, is->U);
    recur->gate_norm(in->mixed_BF, z, O, is->norm, is->norm_step, in->mixed_BF, B, F, is->of_group, is->eps,
                     is->gated_first, 0, threads);
}

/* Computes one layer, from normed_BD to update_BD, and adds the update of its first half to x_BD on the way. */
static int64_t run(const Decoder *is, const Layer *layer, const Attention *rows, const int64_t *rows_B,
                   const Memory *in, int64_t threads, int64_t *wrong) {
    int64_t B = rows->B, D = is->D, I = layer->down.I, F = layer->outer.I;
    if (multiply(&layer->inner, in->normed_BD, D, layer->inner_bias, in->inner_BO, B, threads)) return NO_MEMORY;
    if (layer->recurrent)
        advance_rows(layer, rows_B, B, in, threads);
    else if ((*wrong = attend_rows(is, layer, rows, in, threads)) >= 0)
        return WRONG_ROW;
    if (layer->attention_gate.O) {
        if (multiply(&layer->attention_gate, in->normed_BD, D, layer->gate_bias, in->inner_BO, B, threads))
            return NO_MEMORY;
        recur->gate_norm(in->mixed_BF, in->inner_BO, F, NULL, 0, in->mixed_BF, B, F, F, 0, 0, 1, threads);
    }
    if (multiply(&layer->outer, in->mixed_BF, F, layer->outer_bias, in->update_BD, B, threads)) return NO_MEMORY;
    scale(in->update_BD, B * D, layer->mixed_scale);
    add_norm(in->x_BD, in->update_BD, layer->before_mlp_D, in->normed_BD, B, D, layer->mlp_eps, threads);
    if (multiply(&layer->gate_up, in->normed_BD, D, layer->gate_up_bias, in->gate_up_B2I, B, threads)) return NO_MEMORY;
    gate(in->gate_up_B2I, in->gated_BI, B, I, threads);
    if (multiply(&layer->down, in->gated_BI, I, layer->down_bias, in->update_BD, B, threads)) return NO_MEMORY;
    scale(in->update_BD, B * D, layer->mlp_scale);
    return DONE;
}

/* The next part of a block: 4-byte numbers per row of the step.  8-byte numbers come first and count as two. */
#define PART(numbers) (void *)(block + end), end += 4 * B * (numbers)

/* Cuts a block into a step's arrays.  Returns its size in bytes; block: 0 to compute only that. */
static int64_t cut(uintptr_t block, const Decoder *is, const Attention *rows, Memory *in) {
    int64_t B = rows->B, D = is->D, Q = rows->Q, H = rows->H, end = 0;
    in->positions_B = PART(2);
    in->slots_B = PART(2);
    in->starts_B1 = PART(2); /* B + 1 numbers fit if there is at least one row */
    in->pages_BP = PART(rows->P);
    in->items_J2 = PART(2 * Q);
    in->fresh_B = PART(1);
    in->x_BD = PART(D);
    in->normed_BD = PART(D);
    in->update_BD = PART(D);
    in->inner_BO = PART(is->most_inner);
    in->q_BQH = PART(Q * H);
    in->mixed_BF = PART(is->most_mixed);
    in->channels_BC = PART(is->most_channels);
    in->gates_BH2 = PART(2 * is->most_heads);
    in->angles_BH = PART(H);
    in->gate_up_B2I = PART(2 * is->I);
    in->gated_BI = PART(is->I);
    return end;
}

/* Sets each row's last position, the slot of its key and value, and its state before the first layer, and plans
   attention.  Changes nothing of the rows. */
static int64_t begin(const Decoder *is, Attention *rows, const int64_t *rows_B, const Memory *in, int64_t threads,
                     int64_t *wrong) {
    for (int64_t b = *wrong = 0; b < rows->B; *wrong = ++b) {
        int64_t row = rows_B[b], length = rows->lengths_B[b], position = length - 1;
        if (row < 0 || row >= is->N || length < 1 || length >= is->M || length > is->W * rows->page_size)
            return WRONG_ROW;
        int64_t token = is->tokens_NM[row * is->M + position];
        if (token < 0 || token >= is->V) return WRONG_TOKEN;
        const int32_t *pages = is->pages_NW + row * is->W;
        memcpy(in->pages_BP + b * rows->P, pages, sizeof(int32_t) * rows->P);
        in->positions_B[b] = position;
        in->slots_B[b] = pages[position / rows->page_size] * rows->page_stride + position % rows->page_size;
        in->starts_B1[b] = b;
        in->fresh_B[b] = length == 1;
        float *x_D = in->x_BD + b * is->D;
        if (is->embedding_VD)
            memcpy(x_D, is->embedding_VD + token * is->D, sizeof(float) * is->D);
        else
            is->table.rows(&is->table, &token, x_D, 1);
        for (int64_t i = 0; i < is->D; i++) x_D[i] *= is->embedding_scale;
    }
    in->starts_B1[rows->B] = rows->B;
    *wrong = attention_plan(rows, is->widest, threads, in->items_J2, rows->B * rows->Q);
    return *wrong < 0 ? DONE : WRONG_ROW;
}

/* A step of B rows, and its result. */
typedef struct {
    const Decoder *is;
    const int64_t *rows_B;
    const int32_t *lengths_B;
    float *logits_BV;
    int64_t *token_ids_B, *wrong;
    int64_t B, threads, failed;
} Decode;

static void decode_whole(void *of) {
    Decode *step = of;
    const Decoder *is = step->is;
    const int64_t *rows_B = step->rows_B;
    const int32_t *lengths_B = step->lengths_B;
    int64_t B = step->B, threads = step->threads;
    Attention rows = *is->attention;
    rows.B = B;
    rows.lengths_B = lengths_B;
    rows.P = 1;
    for (int64_t b = 0; b < B; b++)
        while (rows.P < is->W && rows.P * rows.page_size < lengths_B[b]) rows.P++;
    Memory in;
    char *block = malloc(cut(0, is, &rows, &in));
    step->failed = NO_MEMORY;
    if (!block) return;
    cut((uintptr_t)block, is, &rows, &in);
    rows.pages_BP = in.pages_BP;
    rows.query_starts_B1 = in.starts_B1;
    int64_t failed = begin(is, &rows, rows_B, &in, threads, step->wrong);
    const float *turned = NULL;
    for (const Layer *layer = is->layers; layer < is->layers + is->num_layers && !failed; layer++) {
        if (layer->frequencies_R && layer->frequencies_R != turned) {
            turned = layer->frequencies_R;
            turn(in.positions_B, turned, in.angles_BH, B, layer->pairs, layer->angle_scale, threads);
        }
        const float *update = layer == is->layers ? NULL : in.update_BD;
        add_norm(in.x_BD, update, layer->before_attention_D, in.normed_BD, B, is->D, layer->attention_eps, threads);
        failed = run(is, layer, &rows, rows_B, &in, threads, step->wrong);
    }
    if (!failed) {
        add_norm(in.x_BD, in.update_BD, is->norm_D, in.normed_BD, B, is->D, is->norm_eps, threads);
        scale(in.normed_BD, B * is->D, is->logit_scale);
        failed = multiply(&is->head, in.normed_BD, is->D, NULL, step->logits_BV, B, threads) ? NO_MEMORY : DONE;
    }
    if (!failed && step->token_ids_B) {
        likeliest(step->logits_BV, step->token_ids_B, B, is->head.O, threads);
        for (int64_t b = 0; b < B; b++)
            is->tokens_NM[rows_B[b] * is->M + lengths_B[b]] = step->token_ids_B[b] < 0 ? 0 : step->token_ids_B[b];
    }
    free(block);
    step->failed = failed;
}

/* Writes logits_BV of rows_B, which have lengths_B tokens.  token_ids_B: gets the likeliest tokens, or -1; each is also
   written as its row's next token, with 0 in place of -1.  NULL if the caller samples.  wrong: gets the index in B of
   an impossible row; then nothing is written.  threads: at most; attention must have scratch for as many. */
int64_t decode(const Decoder *is, const int64_t *rows_B, const int32_t *lengths_B, int64_t B, float *logits_BV,
               int64_t *token_ids_B, int64_t threads, int64_t *wrong) {
    Decode step = {is, rows_B, lengths_B, logits_BV, token_ids_B, wrong, B, threads, DONE};
    together(threads, decode_whole, &step);
    return step.failed;
}
