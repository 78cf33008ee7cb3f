/* An instruction set with tiles of its own in the place of some of tiles.inc and angles.inc (kernels.h, OWN TILES):
 * generic, with two that count their calls and then do what the tile they replace does, and one that does something else. */
#include <stdio.h>
#include <string.h>

#include "kernels.h"

static void own_scores_2(void* st, void* running_max, const void* qt, const char* k, ptrdiff_t k_stride,
                         ptrdiff_t k_step, ptrdiff_t width, ptrdiff_t keys, const at_ahead* ahead, int n_ahead);
static void own_rescale(void* row, ptrdiff_t keys, double block_max, double m, double l);
static void own_sincos(double* cosines, double* sines, double position, const double* high, const double* low,
                       ptrdiff_t pairs, int layout);

#define OWN_TILES .scores[1] = own_scores_2, .rescale = own_rescale
#define OWN_ANGLES .sincos = own_sincos
#define at_generic at_with_own_tiles /* the other one is linked too */
#include "generic.c"

static int calls;

static void own_scores_2(void* st, void* running_max, const void* qt, const char* k, ptrdiff_t k_stride,
                         ptrdiff_t k_step, ptrdiff_t width, ptrdiff_t keys, const at_ahead* ahead, int n_ahead) {
    calls++;
    f32_scores_2(st, running_max, qt, k, k_stride, k_step, width, keys, ahead, n_ahead);
}

static void own_rescale(void* row, ptrdiff_t keys, double block_max, double m, double l) {
    for (ptrdiff_t j = 0; j < keys; j++) ((float*)row)[j] = (float)(block_max + m + l);
}

static void own_sincos(double* cosines, double* sines, double position, const double* high, const double* low,
                       ptrdiff_t pairs, int layout) {
    calls++;
    angles_sincos(cosines, sines, position, high, low, pairs, layout);
}

#define WIDTH 5
#define KEYS 9

/* Scores by blocks of 1, 2 and 3 vectors of rows. */
static void scores(const at_tiles* t, float* st) {
    static _Alignas(AT_ALIGN) float qt[WIDTH * AT_MAX_ROWS], top[AT_MAX_ROWS];
    static float k[KEYS * WIDTH];
    for (int x = 0; x < WIDTH * AT_MAX_ROWS; x++) qt[x] = (float)(x % 17) - 8;
    for (int x = 0; x < KEYS * WIDTH; x++) k[x] = (float)(x % 11) - 5;
    for (int vectors = 1; vectors <= AT_MAX_VECTORS; vectors++, st += KEYS * AT_MAX_ROWS)
        t->scores[vectors - 1](st, top, qt, (const char*)k, sizeof(float) * WIDTH, 1, WIDTH, KEYS, NULL, 0);
}

int main(void) {
    static _Alignas(AT_ALIGN) float st[2][AT_MAX_VECTORS * KEYS * AT_MAX_ROWS];
    static _Alignas(AT_ALIGN) double high[AT_ANGLE_BLOCK], low[AT_ANGLE_BLOCK], fine[2][2 * AT_ANGLE_BLOCK];
    const at_isa *own = &at_with_own_tiles, *usual = at_isa_at(at_isa_count() - 1);
    int wrong = strcmp(own->name, usual->name) != 0;

    scores(usual->f32, st[0]);
    wrong |= calls != 0;
    scores(own->f32, st[1]);
    wrong |= calls != 1 || memcmp(st[0], st[1], sizeof st[0]) != 0;

    own->f32->rescale(st[1], KEYS, 1, 2, 4);
    for (int j = 0; j < KEYS; j++) wrong |= st[1][j] != 7;

    usual->angles->frequencies(high, low, AT_ANGLE_BLOCK, 0.5, 0);
    usual->angles->sincos(NULL, fine[0], 3, high, low, AT_ANGLE_BLOCK, AT_ALTERNATING);
    wrong |= calls != 1;
    own->angles->sincos(NULL, fine[1], 3, high, low, AT_ANGLE_BLOCK, AT_ALTERNATING);
    wrong |= calls != 2 || memcmp(fine[0], fine[1], sizeof fine[0]) != 0;

    /* What is not overridden, and the other element type, is as before. */
    wrong |= own->f64->scores[1] == own->f32->scores[1] || own->f32->scores[0] != f32_scores_1;
    wrong |= own->f64->scores[1] != f64_scores_2 || own->f32->read != f32_read || own->angles->rotate != angles_rotate;
    puts(wrong ? "WRONG" : "ok");
    return wrong;
}
