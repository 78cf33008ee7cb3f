/* The contract between the fused pass (Cython, _core.pyx) and the tiles (C, one object per instruction set).
 *
 * Index letters, everywhere: i query row, j key, d width, e value width, r lane.
 *
 * Lanes are query rows. A block of up to max_vectors * lanes rows is packed once into Qt[d][r], scaled by
 * scale * log2(e); from then on every step is vertical:
 *
 *     pack      Qt[d][r]  = c * Q[r][d]
 *     scores    St[j][r]  = sum_d K[j][d] * Qt[d][r]       K read in place by broadcast, at any row stride
 *     softcap, add_bias, alibi                             score changes, each over a chunk, in this order
 *     exclude   St[j][r]  = fill where a bit is 0
 *     softmax   St[j][r]  = exp2(St[j][r] - m[r])          m: exact maximum of the chunk; l: sum over j
 *     values    Ot[e][r]  = beta[r] * sum_j V[j][e] * St[j][r] + alpha[r] * Ot[e][r]
 *     unpack    O[r][e]   = Ot[e][r] / l[r]
 *
 * ORDER. The bits of a row must not depend on how rows were grouped, so every tile keeps one order of operations:
 * a score is one chain of FMAs over d = 0, 1, 2, ...; l is one chain of additions and Ot one chain of FMAs over
 * the keys of a chunk of AT_CHUNK keys at absolute indices; chunks merge left to right. An excluded key adds an
 * exact 0 to each chain. ISAs with FMA therefore give equal bits; `generic` (no FMA) is within rounding of them.
 *
 * UNFINISHED ROWS. What a row knows of the keys so far is m, l and o: with t = score * log2(e), m = max t, l = sum of
 * exp2(t - m) and o = sum of exp2(t - m) * value; m = -inf, l = 0, o = 0 without a key. Chunks are merged into exactly
 * this, so a row that goes on from what it knew after key AT_CHUNK * n runs the chain of one call over all keys, with its
 * bits. A sink is applied when the row is finished. In Python this is Partial (partial.py).
 *
 * SMALLEST WEIGHT. exp2 is exactly 0 below 2^AT_MIN_POWER, everywhere and on every ISA: weights in units of their chunk,
 * factors of a merge (alpha, beta), weights that are known to the end. What is lost is far below rounding: l is at least
 * 1, and all keys that are left out together have at most keys * 2^AT_MIN_POWER of it, 2^-69 for 2^31 keys of float,
 * where half a unit in the last place is 2^-24. What is won: on many processors an operation whose result is subnormal
 * takes as long as a hundred others, and the first sums of every peaked row would be. Now they are normal if the values
 * that are not 0 are at least 2^-26 (float), as all of float16 are, or 2^-62 (double).
 *
 * BACKWARD. With P = exp2(S - lse), dP[j][r] = sum_e V[j][e] * dO[r][e], delta[r] = sum_e dO[r][e] * O[r][e] and
 * dS = P * (dP - delta), gradients keep an order of their own, that depends on no block and on no division of the work:
 *
 *     dP        a chain of FMAs over e, as S over d
 *     dq[r]     a chain over the keys of each chunk, chunks added left to right, then times scale
 *     dk[j]     a chain over the queries of each AT_ROW_CHUNK at absolute indices; then times scale, and added to what the
 *               chunks before and the query heads before in the group have left, by one FMA. dv[j] likewise, with scale 1
 *
 * A pair that is excluded adds an exact 0, so padding, batch and threads change no bit.
 *
 * ASSUMPTIONS, checked in Python and Cython, never here: sizes are positive unless said otherwise; scratch pointers
 * (qt, st, ot and the per-lane vectors) are aligned to AT_ALIGN and hold whole vectors; row pointers are aligned
 * to their element; the last axis of a row is contiguous unless a stride is given. Strides are in bytes.
 * A tile cannot fail, allocates nothing and touches no global state.
 *
 * OWN TILES. An <isa>.c gets every tile from the .inc files, written once over its vocabulary. Where an instruction set
 * can do better (a matrix unit, another tile shape), its file puts a function of its own in one slot of the tables below
 * and leaves the others as they are:
 *
 *     static void f32_own_softcap(...);                  declared before the include, with the type of the slot,
 *     #define OWN_TILES .softcap = f32_own_softcap       entries of a designated initialiser: .scores[2] = ... too
 *     #include "tiles.inc"                               for this element type, and undefines it
 *     static void f32_own_softcap(...) { ... }           written after it, where all of tiles.inc is at hand
 *
 * OWN_ANGLES does the same for angles.inc. An own tile keeps the ORDER above. tests/c/check_override.c is such a file.
 */
#ifndef AT_KERNELS_H
#define AT_KERNELS_H

#include <float.h>
#include <stddef.h>
#include <stdint.h>

/* Addresses of pages are held in signed words, and sums must round to their own format: a build for anything else fails,
 * which leaves the pure-NumPy package. */
_Static_assert(sizeof(void*) == 8, "the core is for processors of 64 bits");
#if defined(FLT_EVAL_METHOD) && FLT_EVAL_METHOD == 2
#error "the core needs arithmetic in float and double, not in long double"
#endif

#define AT_CHUNK 256     /* keys per chunk: part of the contract, see ORDER */
#define AT_WORD 32       /* keys per mask word */
#define AT_ROW_CHUNK 192 /* queries per chunk in the backward pass: whole blocks on every ISA */
#define AT_MAX_VECTORS 3 /* widest tile, in vectors of rows */
#define AT_MAX_ROWS 48   /* rows of the largest block of any ISA */
#define AT_ALIGN 64
#ifdef _WIN32 /* everything else in the library is hidden */
#define AT_EXPORTED __declspec(dllexport)
#else
#define AT_EXPORTED __attribute__((visibility("default")))
#endif
#define AT_PANEL 16             /* keys per panel, the layout of stored keys: panel[d][AT_PANEL] */
#define AT_FEW_KEYS 64          /* keys that few_scores brings into panels at once */
#define AT_MIN_POWER_F32 (-100) /* of the smallest weight, see above; the smallest normals are 2^-126 and 2^-1022 */
#define AT_MIN_POWER_F64 (-960)
#define AT_LOG2E 1.4426950408889634074
#define AT_LN2 0.69314718055994530942

/* Formats of numbers, where they need not be the type of the tiles. */
enum { AT_F16, AT_BF16, AT_F32, AT_F64, AT_FORMATS };

#define AT_SIZE_OF(format) ((ptrdiff_t)((format) == AT_F64 ? 8 : (format) == AT_F32 ? 4 : 2)) /* bytes */

/* Rows that are needed soon and lie outside the core's caches: `bytes` from rows[r] + offset on, or from data + r * stride
 * where rows is NULL. Their way from L3 or memory hides behind the scores, if it is spread over their tiles; as one burst it
 * would not. */
typedef struct {
    const char* const* rows;
    const char* data;
    ptrdiff_t stride, n_rows, offset, bytes;
} at_ahead;

/* Values for few_values: `keys` rows, `stride` bytes apart. ahead, ahead_stride: rows to fetch meanwhile, NULL: none. */
typedef struct {
    const char* rows;
    ptrdiff_t stride, keys;
    const char* ahead;
    ptrdiff_t ahead_stride;
} at_value_rows;

/* What the backward pass knows of the rows of a block, [pitch] each: lse in units of log 2, infinite for a row without keys;
 * the share of the softmax that the sink leaves, 1 without one; share * delta - dlse. */
typedef struct {
    void *lse, *share, *delta;
} at_row_numbers;

/* Rows that add_outer contracts: a[key][pitch] by rows[n_rows][width]; and the rows that the sums go to, `stride` bytes apart.
 * first: they hold nothing yet. */
typedef struct {
    const void* a;
    const char* const* rows;
    ptrdiff_t n_rows, pitch;
} at_outer_rows;

typedef struct {
    char* rows;
    ptrdiff_t stride;
    double factor;
    int first;
} at_sums;

/* Candidates for the k largest weights of a row. As soon as they are more than `room`, all but k are given up, and from then
 * on only what is above the smallest of these is taken. A larger room means fewer sorts. */
typedef struct {
    void* values;    /* room + AT_WORD elements; infinite for NaN */
    ptrdiff_t* keys; /* likewise */
    ptrdiff_t n, k, room;
    double limit; /* 0 at first */
} at_top;

/* Bytes of scratch for sorting them. */
#define AT_TOP_SCRATCH(room) (((room) + AT_WORD) * (ptrdiff_t)(sizeof(double) + sizeof(ptrdiff_t)))

/* The tiles of one element type on one instruction set. n = vectors * lanes is the row pitch of qt, st and ot. */
typedef struct {
    size_t itemsize;
    int lanes;       /* rows per vector */
    int max_vectors; /* rows per block = max_vectors * lanes */

    /* rows[r] (r < n_rows) -> qt[width][n] * factor; lanes from n_rows on become 0. */
    void (*pack)(void* qt, const char* const* rows, ptrdiff_t n_rows, int vectors, ptrdiff_t width, double factor);

    /* st[j][n] for `keys` keys from k on; block_max[n] = max(block_max, st), NaN ignored. Index: vectors - 1.
     * k_step: elements between the widths of a key, 1, or AT_PANEL for panels, of which k_stride is 1 / AT_PANEL.
     * ahead: what to fetch meanwhile. */
    void (*scores[AT_MAX_VECTORS])(void* st, void* block_max, const void* qt, const char* k, ptrdiff_t k_stride,
                                   ptrdiff_t k_step, ptrdiff_t width, ptrdiff_t keys, const at_ahead* ahead,
                                   int n_ahead);

    /* to[j] = the element at row + j * stride, which has another format: rounded once, finite numbers staying finite. */
    void (*convert)(void* to, const char* row, ptrdiff_t stride, ptrdiff_t n, int format);

    /* to[j] = the number at from + j * (size of the format), widened; narrow: back into one of 16 bits, rounded once. */
    void (*widen)(void* to, const char* from, ptrdiff_t n, int format);
    void (*narrow)(char* row, const void* from, ptrdiff_t n, int format);

    /* st[j][r] += log2(e) * rows[r][j], finite bias staying finite; an infinite bias replaces the score. */
    void (*add_bias)(void* st, void* block_max, const char* const* rows, ptrdiff_t key_stride, ptrdiff_t n_rows,
                     int vectors, ptrdiff_t keys);

    /* st = cap * tanh(st / cap), both in units of log2(e); slope = -2 log2(e) / cap. */
    void (*softcap)(void* st, void* block_max, int vectors, ptrdiff_t keys, double slope, double cap);

    /* st[j][r] -= slope[r] * |position[r] - j|; slope in units of log2(e), position relative to the first key. */
    void (*alibi)(void* st, void* block_max, const void* slope, const void* position, int vectors, ptrdiff_t keys);

    /* st[j][r] = fill where bit j % 32 of words[j / 32][r] is 0. */
    void (*exclude)(void* st, void* block_max, const uint32_t* words, int vectors, ptrdiff_t keys, double fill);

    /* In place st = exp2(st - block_max), never -0.0. Merges the chunk into m and l and leaves the weights of the old
     * (alpha) and the new (beta) part. */
    void (*softmax[AT_MAX_VECTORS])(void* st, ptrdiff_t keys, const void* block_max, void* m, void* l, void* alpha,
                                    void* beta);

    /* ot[e][n] for `width` columns of v; first != 0: ot is only written. Index: vectors - 1. */
    void (*values[AT_MAX_VECTORS])(void* ot, const void* st, const char* v, ptrdiff_t v_stride, ptrdiff_t width,
                                   ptrdiff_t keys, const void* alpha, const void* beta, int first);

    /* The same, but where st is -0.0 the value is not used: an excluded key may have NaN or Inf there, and 0 * NaN is
     * NaN. Any other weight uses it, 0 too. Slow: a block is redone with it only after NaN was seen in its result. */
    void (*values_marked)(void* ot, const void* st, const char* v, ptrdiff_t v_stride, ptrdiff_t width, ptrdiff_t keys,
                          const void* alpha, const void* beta, int first, int vectors);

    /* 1 if any of ot[width][n] is NaN. */
    int (*any_nan)(const void* ot, int vectors, ptrdiff_t width);

    /* r[n] = 1 / l, 0 where l is 0 (a row without keys). */
    void (*reciprocal)(void* r, const void* l, int vectors);

    /* rows[r][x] = ot[x][r] * factor[r] for x < width; -0.0 becomes 0.0. */
    void (*unpack)(char* const* rows, const void* ot, const void* factor, ptrdiff_t n_rows, int vectors,
                   ptrdiff_t width);

    /* row[j] *= exp2(block_max - m) / l: the weights of one chunk become final ones; 0 where that is below the smallest
     * weight before the division. */
    void (*rescale)(void* row, ptrdiff_t keys, double block_max, double m, double l);

    /* ---- Few rows: lanes are keys, then columns (few.inc). Scores lie in s[r][AT_CHUNK], values in o[r][pitch] with
     * pitch = width in whole vectors, and row r of a group reads the same k and v as the others. ---- */

    /* q[r][width] = factor * rows[r]. */
    void (*few_pack)(void* q, const char* const* rows, ptrdiff_t n_rows, ptrdiff_t width, double factor);

    /* Keys as panels, one after the other; the last one is filled up with zeros. */
    void (*to_panels)(void* panels, const char* k, ptrdiff_t k_stride, ptrdiff_t width, ptrdiff_t keys);

    /* Scores of `keys` keys, stored in the format that is the index; NULL: not read directly. panels: scratch for
     * AT_FEW_KEYS keys; NULL: k is panels, k_stride does not count. Up to AT_PANEL - 1 scores beyond `keys` are written
     * too. */
    void (*few_scores[AT_FORMATS])(void* s, const void* q, ptrdiff_t n_rows, const char* k, ptrdiff_t k_stride,
                                   void* panels, ptrdiff_t width, ptrdiff_t keys, const char* ahead,
                                   ptrdiff_t ahead_stride);

    /* Of one row: s[j] += log2(e) * bias[j], as add_bias; s[j] -= slope * |position - j|, as alibi; s[j] = fill where
     * bit j % 32 of words[j / 32 * pitch] is 0. Scores beyond `keys`, up to whole vectors, become anything. */
    void (*few_bias)(void* s, const char* bias, ptrdiff_t key_stride, ptrdiff_t keys);
    void (*few_alibi)(void* s, double slope, double position, ptrdiff_t keys);
    void (*few_exclude)(void* s, const uint32_t* words, ptrdiff_t pitch, ptrdiff_t keys, double fill);

    /* Of one row: s = exp2(s - max), never -0.0; returns the maximum. */
    double (*few_softmax)(void* s, ptrdiff_t keys);

    /* o[r][e] = sum_j s[r][j] * v[j][e] and l[r] = sum_j s[r][j]; indexed like few_scores. Marked as in values_marked,
     * for the type of the tiles only. */
    void (*few_values[AT_FORMATS])(void* o, void* l, const void* s, ptrdiff_t n_rows, const at_value_rows* v,
                                   ptrdiff_t width);
    void (*few_values_marked)(void* o, void* l, const void* s, ptrdiff_t n_rows, const char* v, ptrdiff_t v_stride,
                              ptrdiff_t width, ptrdiff_t keys);

    /* Chunk maxima and sums [n] into m and l, as softmax does; alpha and beta for few_blend. */
    void (*few_merge)(const void* block_max, const void* sum, void* m, void* l, void* alpha, void* beta, int vectors);

    /* o[n] = beta * chunk[n] + alpha * o[n], n whole vectors; row[width] = factor * o[width], -0.0 becoming 0.0. */
    void (*few_blend)(void* o, const void* chunk, ptrdiff_t n, double alpha, double beta);
    void (*few_store)(char* row, const void* o, ptrdiff_t width, double factor);

    /* ---- Statistics of the weights (stats.inc). Their sums are in double, with terms of at most 16 numbers. ---- */

    /* After softmax: totals[r] = alpha[r] * totals[r] + beta[r] * sum_j st[j][r], the l of softmax with more digits. The
     * first key of st is one of AT_WORD * n in its chunk. few_total: the sum of one row, with the same bits. */
    void (*add_totals)(double* totals, const void* st, ptrdiff_t keys, const void* alpha, const void* beta,
                       int vectors);
    double (*few_total)(const void* s, ptrdiff_t keys);

    /* With m and inverse = 1 / l of each row known, x = st - m and e = exp2(x): st = weight = e * inverse; rest[r] += sum of
     * e where x < 0; moment[r] += sum of e * x, in which an e of 0 counts 0. */
    void (*measure)(void* st, ptrdiff_t keys, const void* m, const void* inverse, double* rest, double* moment,
                    int vectors);

    /* sum[j] += sum_r rows[r][j]. Row 0 is one of 4 * n in its head, so that the order does not depend on the block. */
    void (*add_rows)(double* sum, const char* const* rows, ptrdiff_t n_rows, ptrdiff_t keys);

    /* The k largest of the rows that keep_top has seen, of numbers >= 0 and NaN, which is above every number; 0 is not kept.
     * store_top writes them in descending order with their keys, of equal ones the lower key first, and no more than there
     * are. scratch: AT_TOP_SCRATCH of `room`. */
    void (*keep_top)(at_top* top, const void* row, ptrdiff_t n, ptrdiff_t first_key, void* scratch);
    void (*store_top)(at_top* top, void* values, ptrdiff_t* keys, void* scratch);

    /* ---- The backward pass (backward.inc). S, P, dP and dS lie as st does. ---- */

    /* With p = exp2(st - lse[r]): st = P = p * share[r] and dp = dS = p * (dp * share[r] - delta[r]); 0 where st is -inf. */
    void (*weigh)(void* st, void* dp, const at_row_numbers* rows, int vectors, ptrdiff_t keys);

    /* sums[r] = sum_e a[e][r] * b[e][r]. */
    void (*row_dots)(void* sums, const void* a, const void* b, int vectors, ptrdiff_t width);

    /* ds *= 1 - (capped / cap)^2, where ds is not 0. */
    void (*uncap)(void* ds, const void* capped, int vectors, ptrdiff_t keys, double cap);

    /* to[j][e] += factor * sum a[j][r] * rows[r][e] over the rows of all parts, one chain. marked: a product counts only if
     * its factor in a is not 0 (slow). */
    void (*add_outer)(const at_sums* to, const at_outer_rows* parts, int n_parts, ptrdiff_t width, ptrdiff_t keys,
                      int marked);

    /* Each 0 of ds becomes -0.0, as values_marked takes it. */
    void (*mark_zeros)(void* ds, int vectors, ptrdiff_t keys);

    /* 1 if no number of these rows is NaN or infinite. */
    int (*all_finite)(const char* const* rows, ptrdiff_t n_rows, ptrdiff_t width);

    /* The elements from `to` on, `stride` bytes apart, += row[j]. */
    void (*add_row)(char* to, ptrdiff_t stride, const void* row, ptrdiff_t keys);

    /* sums[r] += sum_j ds[j][r] * |position[r] - j|. */
    void (*add_distances)(double* sums, const void* ds, const void* position, ptrdiff_t n_rows, int vectors,
                          ptrdiff_t keys);

    /* Dependent-free FMAs for measuring the peak: 2 * lanes * AT_PEAK_FMAS FLOPs per round. */
    double (*fma_peak)(ptrdiff_t rounds);

    /* Reads n elements and does nothing else worth mentioning, for measuring the bandwidth. */
    double (*read)(const void* data, ptrdiff_t n);
} at_tiles;

#define AT_PEAK_FMAS 24

/* Positions: sines and cosines of position * ratio^i for the pairs i of a row, see angles.inc. Every table is scratch,
 * aligned to AT_ALIGN and padded to whole blocks of AT_ANGLE_BLOCK pairs, which are computed with the rest; only the
 * caller's row ends where it ends. A position is a whole number; positions and angles (radians) are at most 2^50.
 * Measured against exact values up to an angle of 2^40: sincos is off by at most 8.2e-17, rows by 2.6e-16
 * (without FMA 2.9e-16). Beyond, the error of ratio^i shows: up to 5e-15 at 2^50. */
#define AT_ANGLE_BLOCK 8
#define AT_STRIP_PAIRS 256 /* most pairs of a row that are at work at once */

/* Rows for rotate_rows: row r lies at x + r * x_stride and goes to y + r * y_stride (bytes). y may be x; other overlaps are
 * not allowed. Elements from tail_from on, `tail` of them, are copied. Row r is rotated by table + r * pitch: cosines
 * first, after `sines` doubles the sines; laid out by sum_of. */
typedef struct {
    const char* x;
    char* y;
    ptrdiff_t x_stride, y_stride, rows;
    ptrdiff_t pairs, apart; /* apart: elements between the members of a pair; not used if they are interleaved */
    ptrdiff_t tail_from, tail;
    const double* table;
    ptrdiff_t pitch, sines;
} at_rotary_rows;

enum { AT_APART, AT_ALTERNATING, AT_ROTATION }; /* layouts of sines and cosines */

typedef struct {
    /* high[i] + low[i] = ratio^i * 2 / pi, the quarter turns per position. */
    void (*frequencies)(double* high, double* low, ptrdiff_t pairs, double ratio_high, double ratio_low);

    /* Sines and cosines of the angles of the pairs, laid out as
     *     AT_APART          cosines[i] = cos, sines[i] = sin
     *     AT_ALTERNATING    sines[2 i] = sin, sines[2 i + 1] = cos: a fine row; cosines is not used
     *     AT_ROTATION       cosines[2 i] = cosines[2 i + 1] = cos, sines[2 i] = sin, sines[2 i + 1] = -sin: for rotate
     * high + low: quarter turns per position of each pair, any numbers. */
    void (*sincos)(double* cosines, double* sines, double position, const double* high, const double* low,
                   ptrdiff_t pairs, int layout);

    /* row[width] = the fine row of the sum of both positions, clamped to [-1, 1]. An odd width ends with a sine. */
    void (*rotate)(double* row, const double* cosines, const double* sines, const double* fine, ptrdiff_t width);

    /* The same, rounded once to float. */
    void (*rotate_f32)(float* row, const double* cosines, const double* sines, const double* fine, ptrdiff_t width);

    /* A table row: cosine and sine of the sum of two angles, times a factor each. a[i], a[pairs + i] = cosine and sine of
     * one angle, b those of the other. interleaved = 0: table[i] = cosine, table[pairs + i] = sine; else
     * table[2 i] = table[2 i + 1] = cosine, table[2 pairs + 2 i] = -sine, table[2 pairs + 2 i + 1] = sine. */
    void (*sum_of)(double* table, const double* a, const double* b, ptrdiff_t pairs, double cosine_factor,
                   double sine_factor, int interleaved);

    /* [AT_F16 ...][halves, interleaved]: the pairs of each row rotated by its table, rounded once at the end. */
    void (*rotate_rows[4][2])(const at_rotary_rows* rows);
} at_angles;

typedef struct {
    const char* name;
    const at_tiles *f32, *f64;
    const at_angles* angles;
} at_isa;

/* dispatch.c */
int at_isa_count(void);             /* every ISA of this build, best first */
const at_isa* at_isa_at(int index); /* 0 <= index < at_isa_count() */
int at_isa_supported(int index);    /* this processor and operating system can run it */

/* idle.c. Tiles of the same element size and lanes that do nothing: those for scores, the others are NULL. */
at_tiles at_idle_like(const at_tiles* tiles);

/* pool.c. task(job, index, slot): index < tasks, slot < threads names the scratch of the running thread. */
typedef void (*at_task)(void* job, ptrdiff_t index, int slot);
void at_pool_run(at_task task, void* job, ptrdiff_t tasks, int threads);
void at_pass(int64_t* passed,
             int64_t place); /* from a task, to others of its job: it has come so far, and what it wrote */
void at_await(const int64_t* passed, int64_t place); /* until a task with a lower index has */
AT_EXPORTED int at_pool_workers(void); /* threads started so far; found by this name in the loaded library */
void* at_scratch(size_t bytes);        /* this thread's scratch, AT_ALIGN aligned, kept; NULL: no memory */

/* scalar.c. The same bits on every machine, which the C library's do not give; off by at most 0.52 and 1.3 ULP. at_exp2 is
 * 0 below 2^AT_MIN_POWER_F64. */
double at_log2(double x);
double at_exp2(double x);

/* bits.c. words[w][n] from booleans: bit j of row r is rows[r][j * key_stride] != 0. */
void at_mask_words(uint32_t* words, const char* const* rows, ptrdiff_t key_stride, ptrdiff_t n_rows, ptrdiff_t pitch,
                   ptrdiff_t keys);

/* 1 if the keys that a row allows, row[j * key_stride] != 0 for j < keys, are one run: lo <= j < hi, or 0, 0 for none.
 * Else 0, and lo and hi stay as they are. keys >= 0. */
int at_mask_run(const char* row, ptrdiff_t key_stride, ptrdiff_t keys, ptrdiff_t* lo, ptrdiff_t* hi);

#endif
