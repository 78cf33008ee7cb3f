/* Fuzz target: the contract of the tiles (kernels.h), as the fused pass uses them, for every instruction set of this machine.
 *
 *     clang -fsanitize=fuzzer,address,undefined ... -I src/attentile/core/kernels   libFuzzer: ./tiles_fuzz -max_total_time=30
 *     gcc -DSTANDALONE -fsanitize=address,undefined ...                              random bytes: ./tiles_fuzz 30 (seconds)
 *
 * Every array is an allocation of exactly its size, and every row of the caller one of its own, so that a sanitizer sees one
 * element too many. Bytes choose sizes, options and seeds. Checked: tiles with and without FMA, for many and for few rows,
 * give the same result within rounding, and those with FMA the same bits. */
#define _GNU_SOURCE
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "halves.h"
#include "kernels.h"

#define SINGLE 4 /* bytes of a float */

typedef struct {
    const uint8_t* data;
    size_t size, at;
} source;

static unsigned next(source* from, unsigned choices) {
    const unsigned byte = from->at < from->size ? from->data[from->at] : 0;
    from->at++;
    return byte % choices;
}

typedef struct { /* one case: rows x keys of one chunk */
    ptrdiff_t item, n_rows, keys, start, width, value_width, panels;
    int softcap, bias, alibi, exclude, bias_stride, mask_stride;
    uint64_t seed;
    char **q, **out, **bias_rows, **mask_rows;
    char *k, *v;
    ptrdiff_t k_stride, v_stride;
    int format;        /* in which keys and values are stored: the type of the tiles, or one of 16 bits */
    char *k16, *v16;   /* the same numbers in 16 bits; NULL: they are not */
    ptrdiff_t k16_stride, v16_stride;
    double slope[AT_MAX_ROWS], position[AT_MAX_ROWS];
} chunk_case;

static void fail(const char* what, const char* isa, const chunk_case* c) {
    fprintf(stderr, "tiles_fuzz: %s (%s, %zd bytes, %zd rows, %zd keys, width %zd, %zd)\n", what, isa, c->item,
            c->n_rows, c->keys, c->width, c->value_width);
    abort();
}

static void* exactly(ptrdiff_t bytes) {
    void* p = NULL;
    if (posix_memalign(&p, AT_ALIGN, (size_t)(bytes > 0 ? bytes : 1))) abort();
    memset(p, 0xff, (size_t)bytes); /* NaN: what is read before it is written shows */
    return p;
}

static double number(uint64_t* seed) { /* in [-2, 2) */
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return (double)(int32_t)(*seed >> 32) / 0x1p30;
}

static void put(char* p, ptrdiff_t item, double x) {
    if (item == SINGLE)
        *(float*)p = (float)x;
    else
        *(double*)p = x;
}

static double get(const char* p, ptrdiff_t item) {
    return item == SINGLE ? (double)*(const float*)p : *(const double*)p;
}

/* n rows of their own, each `elements` long, `step` bytes apart (0: the element's size). */
static char** rows_of(ptrdiff_t n, ptrdiff_t elements, ptrdiff_t item, ptrdiff_t step, uint64_t* seed) {
    char** rows = malloc((size_t)n * sizeof *rows);
    for (ptrdiff_t r = 0; r < n; r++) {
        rows[r] = malloc((size_t)((elements - 1) * step + item));
        for (ptrdiff_t x = 0; x < elements; x++) put(rows[r] + x * step, item, number(seed));
    }
    return rows;
}

static void free_rows(char** rows, ptrdiff_t n) {
    if (!rows) return;
    for (ptrdiff_t r = 0; r < n; r++) free(rows[r]);
    free(rows);
}

static void draw(chunk_case* c, source* from) {
    static const unsigned char edges[] = {1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 31, 32, 33, 47, 48};
    memset(c, 0, sizeof *c);
    c->item = next(from, 2) ? SINGLE : 2 * SINGLE;
    c->n_rows = next(from, 2) ? 1 + next(from, AT_MAX_ROWS) : edges[next(from, sizeof edges)];
    c->start = AT_WORD * next(from, 3);
    c->keys = next(from, 2) ? 1 + next(from, (unsigned)(AT_CHUNK - c->start)) : edges[next(from, sizeof edges)];
    c->width = next(from, 2) ? 1 + next(from, 70) : edges[next(from, sizeof edges)];
    c->value_width = next(from, 2) ? 1 + next(from, 70) : edges[next(from, sizeof edges)];
    c->panels = next(from, 2);
    c->softcap = next(from, 2), c->bias = next(from, 2), c->alibi = next(from, 2), c->exclude = next(from, 2);
    c->bias_stride = (int)(c->item * (1 + next(from, 3)));
    c->mask_stride = 1 + (int)next(from, 3);
    for (int x = 0; x < 4; x++) c->seed = c->seed << 8 | next(from, 256);
}

/* Rows of floats in 16 bits; the floats become what these hold. */
static char* halves_of(const chunk_case* c, char* rows, ptrdiff_t stride, ptrdiff_t half_stride, ptrdiff_t width) {
    char* halves = malloc((size_t)((c->keys - 1) * half_stride + width * 2));
    for (ptrdiff_t j = 0; j < c->keys; j++)
        for (ptrdiff_t d = 0; d < width; d++) {
            uint16_t* half = (uint16_t*)(halves + j * half_stride) + d;
            float* x = (float*)(rows + j * stride) + d;
            *half = c->format == AT_F16 ? at_f16_of(*x) : at_bf16_of(*x);
            *x = c->format == AT_F16 ? at_float_of_f16(*half) : at_float_of_bf16(*half);
        }
    return halves;
}

static void fill(chunk_case* c, source* from) {
    uint64_t seed = c->seed;
    const ptrdiff_t pad_k = c->item * next(from, 5), pad_v = c->item * next(from, 5);
    c->q = rows_of(c->n_rows, c->width, c->item, c->item, &seed);
    c->out = rows_of(c->n_rows, c->value_width, c->item, c->item, &seed);
    c->bias_rows = c->bias ? rows_of(c->n_rows, c->keys, c->item, c->bias_stride, &seed) : NULL;
    c->mask_rows = malloc((size_t)c->n_rows * sizeof(char*));
    for (ptrdiff_t r = 0; r < c->n_rows; r++) {
        c->mask_rows[r] = malloc((size_t)((c->keys - 1) * c->mask_stride + 1));
        for (ptrdiff_t j = 0; j < c->keys; j++) c->mask_rows[r][j * c->mask_stride] = !c->exclude || number(&seed) > -1;
        c->slope[r] = fabs(number(&seed)), c->position[r] = (double)(int)(40 * number(&seed));
        for (ptrdiff_t j = 0; c->bias && j < c->keys; j++)
            if (number(&seed) > 1.8) put(c->bias_rows[r] + j * c->bias_stride, c->item, -(double)INFINITY);
    }
    c->format = c->item == SINGLE ? (int[]){AT_F32, AT_F16, AT_BF16}[next(from, 3)] : AT_F64;
    c->k_stride = c->width * c->item + pad_k, c->v_stride = c->value_width * c->item + pad_v;
    c->k = malloc((size_t)((c->keys - 1) * c->k_stride + c->width * c->item)); /* the last row ends where it ends */
    c->v = malloc((size_t)((c->keys - 1) * c->v_stride + c->value_width * c->item));
    for (ptrdiff_t j = 0; j < c->keys; j++) {
        for (ptrdiff_t d = 0; d < c->width; d++) put(c->k + j * c->k_stride + d * c->item, c->item, number(&seed));
        for (ptrdiff_t e = 0; e < c->value_width; e++)
            put(c->v + j * c->v_stride + e * c->item, c->item, number(&seed));
    }
    c->k16_stride = c->k_stride / 2, c->v16_stride = c->v_stride / 2;
    c->k16 = c->format < AT_F32 ? halves_of(c, c->k, c->k_stride, c->k16_stride, c->width) : NULL;
    c->v16 = c->format < AT_F32 ? halves_of(c, c->v, c->v_stride, c->v16_stride, c->value_width) : NULL;
}

static void release(chunk_case* c) {
    free_rows(c->q, c->n_rows), free_rows(c->out, c->n_rows), free_rows(c->bias_rows, c->n_rows);
    free_rows(c->mask_rows, c->n_rows);
    free(c->k), free(c->v), free(c->k16), free(c->v16);
}

static void set_all(char* p, ptrdiff_t item, ptrdiff_t n, double x) {
    for (ptrdiff_t i = 0; i < n; i++) put(p + i * item, item, x);
}

static double factor_of(const chunk_case* c) { return AT_LOG2E / sqrt((double)c->width); }

/* The panels of all keys, as a cache holds them. */
static char* panels_of(const at_tiles* t, const chunk_case* c) {
    char* panels = exactly((c->keys + AT_PANEL - 1) / AT_PANEL * AT_PANEL * c->width * c->item);
    t->to_panels(panels, c->k, c->k_stride, c->width, c->keys);
    return panels;
}

/* Many rows: blocks of what the widest tile takes. Leaves the results in c->out. */
static void many(const at_tiles* t, const chunk_case* c, ptrdiff_t first, ptrdiff_t n_rows, int marked) {
    const ptrdiff_t item = c->item, vectors = (n_rows + t->lanes - 1) / t->lanes, n = vectors * t->lanes;
    const int v = (int)vectors;
    char *qt = exactly(c->width * n * item), *st = exactly(c->keys * n * item),
         *ot = exactly(c->value_width * n * item);
    char *top = exactly(n * item), *m = exactly(n * item), *l = exactly(n * item), *alpha = exactly(n * item);
    char *beta = exactly(n * item), *slope = exactly(n * item), *position = exactly(n * item);
    char* panels = c->panels ? panels_of(t, c) : NULL;
    uint32_t* words = exactly((c->keys + AT_WORD - 1) / AT_WORD * n * 4);
    const at_ahead ahead[2] = {{(const char* const*)c->out + first, NULL, 0, n_rows, 0, c->value_width * item},
                               {NULL, c->v, c->v_stride, c->keys, 0, c->value_width * item}};
    set_all(top, item, n, -(double)INFINITY), set_all(m, item, n, -(double)INFINITY), set_all(l, item, n, 0);
    set_all(slope, item, n, 0), set_all(position, item, n, 0);
    for (ptrdiff_t r = 0; r < n_rows; r++) {
        put(slope + r * item, item, c->slope[first + r]), put(position + r * item, item, c->position[first + r]);
    }
    t->pack(qt, (const char* const*)c->q + first, n_rows, v, c->width, factor_of(c));
    t->scores[v - 1](st, top, qt, panels ? panels : c->k, panels ? c->width * item : c->k_stride, panels ? AT_PANEL : 1,
                     c->width, c->keys, ahead, (int)(c->seed % 3));
    set_all(top, item, n, -(double)INFINITY);
    if (c->softcap) t->softcap(st, top, v, c->keys, -2 / 5.0, AT_LOG2E * 5.0);
    if (c->bias) t->add_bias(st, top, (const char* const*)c->bias_rows + first, c->bias_stride, n_rows, v, c->keys);
    if (c->alibi) t->alibi(st, top, slope, position, v, c->keys);
    memset(words, 0, (size_t)((c->keys + AT_WORD - 1) / AT_WORD * n * 4));
    at_mask_words(words, (const char* const*)c->mask_rows + first, c->mask_stride, n_rows, n, c->keys);
    set_all(top, item, n, -(double)INFINITY);
    t->exclude(st, top, words, v, c->keys, -(double)INFINITY);
    t->softmax[v - 1](st, c->keys, top, m, l, alpha, beta);
    if (marked) t->exclude(st, slope, words, v, c->keys, -0.0); /* as the pass marks weights */
    if (marked)
        t->values_marked(ot, st, c->v, c->v_stride, c->value_width, c->keys, alpha, beta, 1, v);
    else
        t->values[v - 1](ot, st, c->v, c->v_stride, c->value_width, c->keys, alpha, beta, 1);
    if (t->any_nan(ot, v, c->value_width)) fail("NaN from finite numbers", "", c);
    t->reciprocal(alpha, l, v);
    t->unpack(c->out + first, ot, alpha, n_rows, v, c->value_width);
    free(qt), free(st), free(ot), free(top), free(m), free(l), free(alpha), free(beta), free(slope), free(position);
    free(panels), free(words);
}

/* From rows, from panels of a cache, or from either in 16 bits. */
static void few_scores(const at_tiles* t, const chunk_case* c, char* s, const char* q, char* panels) {
    const ptrdiff_t n = (c->keys + AT_PANEL - 1) / AT_PANEL * AT_PANEL * c->width;
    char* stored = c->panels && c->k16 ? exactly(n * 2) : NULL;
    if (stored) t->narrow(stored, panels, n, c->format);
    const char* rows = c->k16 ? c->k16 : c->k;
    const ptrdiff_t stride = c->k16 ? c->k16_stride : c->k_stride;
    t->few_scores[c->format](s, q, c->n_rows, c->panels ? (stored ? stored : panels) : rows,
                             c->panels ? c->width * AT_SIZE_OF(c->format) : stride, c->panels ? NULL : panels, c->width,
                             c->keys, c->seed % 2 ? c->v : NULL, c->v_stride);
    free(stored);
}

/* Whether `widen` and `narrow` lead from one form of the values to the other and back. */
static void both_ways(const at_tiles* t, const chunk_case* c, const char* isa) {
    char *wide = exactly(c->value_width * c->item), *half = exactly(c->value_width * 2);
    t->widen(wide, c->v16, c->value_width, c->format);
    t->narrow(half, wide, c->value_width, c->format);
    if (memcmp(wide, c->v, (size_t)(c->value_width * c->item))) fail("widen differs", isa, c);
    if (memcmp(half, c->v16, (size_t)(c->value_width * 2))) fail("narrow differs", isa, c);
    free(wide), free(half);
}

/* Few rows: lanes are keys. All rows at once. */
static void few(const at_tiles* t, const chunk_case* c, int marked) {
    const at_value_rows values = {.rows = c->v16 ? c->v16 : c->v, .stride = c->v16 ? c->v16_stride : c->v_stride,
                                  .keys = c->keys, .ahead = c->seed % 2 ? c->k : NULL, .ahead_stride = c->k_stride};
    const ptrdiff_t item = c->item, lanes = t->lanes, pitch = (c->value_width + lanes - 1) / lanes * lanes;
    const ptrdiff_t vectors = (c->n_rows + t->lanes - 1) / t->lanes, n = vectors * t->lanes;
    char *q = exactly(c->n_rows * c->width * item), *s = exactly(c->n_rows * AT_CHUNK * item);
    char *o = exactly(c->n_rows * pitch * item), *top = exactly(n * item), *sum = exactly(n * item);
    char *m = exactly(n * item), *l = exactly(n * item), *alpha = exactly(n * item), *beta = exactly(n * item);
    char *panels = c->panels ? panels_of(t, c) : exactly(AT_FEW_KEYS * c->width * item), *from = s + c->start * item;
    uint32_t* words = exactly((c->keys + AT_WORD - 1) / AT_WORD * n * 4);
    set_all(m, item, n, -(double)INFINITY), set_all(l, item, n, 0), set_all(top, item, n, 0), set_all(sum, item, n, 0);
    at_mask_words(words, (const char* const*)c->mask_rows, c->mask_stride, c->n_rows, n, c->keys);
    t->few_pack(q, (const char* const*)c->q, c->n_rows, c->width, factor_of(c));
    few_scores(t, c, from, q, panels);
    for (ptrdiff_t r = 0; r < c->n_rows; r++) {
        char* row = from + r * AT_CHUNK * item;
        char* unused = exactly(t->lanes * item);
        set_all(unused, item, t->lanes, 0);
        if (c->softcap)
            t->softcap(row, unused, 1, (c->keys + t->lanes - 1) / t->lanes, -2 / 5.0, AT_LOG2E * 5.0);
        if (c->bias) t->few_bias(row, c->bias_rows[r], c->bias_stride, c->keys);
        if (c->alibi) t->few_alibi(row, c->slope[r], c->position[r], c->keys);
        t->few_exclude(row, words + r, n, c->keys, -(double)INFINITY);
        put(top + r * item, item, t->few_softmax(row, c->keys));
        if (marked) t->few_exclude(row, words + r, n, c->keys, -0.0);
        free(unused);
    }
    if (marked)
        t->few_values_marked(o, sum, from, c->n_rows, c->v, c->v_stride, c->value_width, c->keys);
    else
        t->few_values[c->format](o, sum, from, c->n_rows, &values, c->value_width);
    t->few_merge(top, sum, m, l, alpha, beta, (int)vectors);
    t->reciprocal(alpha, l, (int)vectors);
    for (ptrdiff_t r = 0; r < c->n_rows; r++)
        t->few_store(c->out[r], o + r * pitch * item, c->value_width, get(alpha + r * item, item));
    free(q), free(s), free(o), free(top), free(sum), free(m), free(l), free(alpha), free(beta), free(panels),
        free(words);
}

/* Whether c->out is near `want`, and the same if both come from FMA. */
static void compare(const chunk_case* c, const char* isa, const char* way, double* want, int first, int exact) {
    const double bound = (c->item == SINGLE ? 0x1p-23 : 0x1p-52) * (double)(64 + c->width + c->keys) * 8;
    for (ptrdiff_t r = 0; r < c->n_rows; r++)
        for (ptrdiff_t e = 0; e < c->value_width; e++) {
            const double x = get(c->out[r] + e * c->item, c->item), y = want[r * c->value_width + e];
            if (first) want[r * c->value_width + e] = x;
            if (!first && !(exact ? x == y : fabs(x - y) <= bound)) fail(way, isa, c);
        }
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    source from = {data, size, 0};
    chunk_case c;
    draw(&c, &from);
    fill(&c, &from);
    double* want = malloc((size_t)(c.n_rows * c.value_width) * sizeof *want);
    int exact = -1; /* -1: nothing to compare with yet */
    for (int x = 0; x < at_isa_count(); x++) {
        if (!at_isa_supported(x)) continue;
        const at_isa* isa = at_isa_at(x);
        const at_tiles* t = c.item == SINGLE ? isa->f32 : isa->f64;
        const int fma = strcmp(isa->name, "generic") != 0;
        const ptrdiff_t block = t->lanes * t->max_vectors;
        if (c.v16) both_ways(t, &c, isa->name);
        for (int marked = 0; marked < 2; marked++) {
            for (ptrdiff_t r = 0; r < c.n_rows; r += block)
                many(t, &c, r, c.n_rows - r < block ? c.n_rows - r : block, marked);
            compare(&c, isa->name, marked ? "values_marked differs" : "tiles differ", want, exact < 0,
                    fma && exact == 1);
            if (exact < 0) exact = fma;
            few(t, &c, marked);
            compare(&c, isa->name, marked ? "few, marked, differs" : "few differs", want, 0, fma && exact == 1);
        }
    }
    free(want);
    release(&c);
    return 0;
}

#ifdef STANDALONE
int main(int count, char** arguments) {
    const time_t end = time(NULL) + (count > 1 ? atoi(arguments[1]) : 5);
    uint64_t seed = 1;
    long runs = 0;
    for (; time(NULL) < end; runs++) {
        uint8_t data[40];
        for (size_t x = 0; x < sizeof data; x++) data[x] = (uint8_t)(int)(number(&seed) * 1e6);
        LLVMFuzzerTestOneInput(data, sizeof data);
    }
    printf("tiles_fuzz: %ld inputs, not guided by coverage, no finding\n", runs);
    return 0;
}
#endif
