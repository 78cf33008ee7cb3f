/* Tiles that do nothing, for a run that only counts what the pass would do (_count.pxi). It needs the ones that give a
 * chunk its scores; the others stay NULL. */
#include "kernels.h"

#pragma GCC diagnostic ignored "-Wunused-parameter" /* that is what they are here for */

static void scores(void* st, void* block_max, const void* qt, const char* k, ptrdiff_t k_stride, ptrdiff_t k_step,
                   ptrdiff_t width, ptrdiff_t keys, const at_ahead* ahead, int n_ahead) {}

static void convert(void* to, const char* row, ptrdiff_t stride, ptrdiff_t n, int format) {}

static void add_bias(void* st, void* block_max, const char* const* rows, ptrdiff_t key_stride, ptrdiff_t n_rows,
                     int vectors, ptrdiff_t keys) {}

static void softcap(void* st, void* block_max, int vectors, ptrdiff_t keys, double slope, double cap) {}

static void alibi(void* st, void* block_max, const void* slope, const void* position, int vectors, ptrdiff_t keys) {}

static void exclude(void* st, void* block_max, const uint32_t* words, int vectors, ptrdiff_t keys, double fill) {}

static void few_scores(void* s, const void* q, ptrdiff_t n_rows, const char* k, ptrdiff_t k_stride, void* panels,
                       ptrdiff_t width, ptrdiff_t keys, const char* ahead, ptrdiff_t ahead_stride) {}

static void few_bias(void* s, const char* bias, ptrdiff_t key_stride, ptrdiff_t keys) {}

static void few_alibi(void* s, double slope, double position, ptrdiff_t keys) {}

static void few_exclude(void* s, const uint32_t* words, ptrdiff_t pitch, ptrdiff_t keys, double fill) {}

at_tiles at_idle_like(const at_tiles* tiles) {
    return (at_tiles){
        .itemsize = tiles->itemsize,
        .lanes = tiles->lanes,
        .max_vectors = tiles->max_vectors,
        .scores = {scores, scores, scores},
        .convert = convert,
        .add_bias = add_bias,
        .softcap = softcap,
        .alibi = alibi,
        .exclude = exclude,
        .few_scores = {few_scores, few_scores, few_scores, few_scores},
        .few_bias = few_bias,
        .few_alibi = few_alibi,
        .few_exclude = few_exclude,
    };
}
