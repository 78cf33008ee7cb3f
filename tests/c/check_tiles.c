/* The tiles without Python: attention of a few heads through the table of each instruction set that the processor has.
 * Prints a line "name hash" each; the hashes of those with FMA must be equal, on every platform and by every compiler.
 *
 *     cc -std=c11 -I src/attentile/core/kernels tests/c/check_tiles.c (the objects of every kernel) -lpthread */
#include <inttypes.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "kernels.h"

#define ROWS 37
#define KEYS 200
#define WIDTH 67

static union {
    float f32[KEYS * WIDTH];
    double f64[KEYS * WIDTH];
} q, k, v, out;
static _Alignas(AT_ALIGN) char qt[WIDTH * AT_MAX_ROWS * 8], st[AT_CHUNK * AT_MAX_ROWS * 8], ot[WIDTH * AT_MAX_ROWS * 8];
static _Alignas(AT_ALIGN) char top[AT_MAX_ROWS * 8], m[AT_MAX_ROWS * 8], l[AT_MAX_ROWS * 8], alpha[AT_MAX_ROWS * 8],
    beta[AT_MAX_ROWS * 8];

/* A number in [-1, 1): Weyl sequence, the same everywhere. */
static uint64_t state;
static double next(void) {
    state += 0x9e3779b97f4a7c15u;
    return (double)(int64_t)(state ^ state << 31) * 0x1p-63;
}

static void fill(void* to, size_t itemsize, int n) {
    for (int x = 0; x < n; x++) {
        const double value = next();
        if (itemsize == sizeof(float))
            ((float*)to)[x] = (float)value;
        else
            ((double*)to)[x] = value;
    }
}

static void fill_lanes(void* to, size_t itemsize, double value) {
    for (int x = 0; x < AT_MAX_ROWS; x++) {
        if (itemsize == sizeof(float))
            ((float*)to)[x] = (float)value;
        else
            ((double*)to)[x] = value;
    }
}

/* Rows first .. first + n of the output, by one block. */
static void attend(const at_tiles* t, int first, int n) {
    const ptrdiff_t pitch = (ptrdiff_t)(WIDTH * t->itemsize);
    const int vectors = (n + t->lanes - 1) / t->lanes;
    const char* from[AT_MAX_ROWS];
    char* to[AT_MAX_ROWS];
    for (int r = 0; r < n; r++) {
        from[r] = (const char*)&q + (first + r) * pitch;
        to[r] = (char*)&out + (first + r) * pitch;
    }
    fill_lanes(top, t->itemsize, -INFINITY);
    fill_lanes(m, t->itemsize, -INFINITY);
    fill_lanes(l, t->itemsize, 0);
    t->pack(qt, from, n, vectors, WIDTH, AT_LOG2E / 8);
    t->scores[vectors - 1](st, top, qt, (const char*)&k, pitch, 1, WIDTH, KEYS, NULL, 0);
    t->softmax[vectors - 1](st, KEYS, top, m, l, alpha, beta);
    t->values[vectors - 1](ot, st, (const char*)&v, pitch, WIDTH, KEYS, alpha, beta, 1);
    t->reciprocal(m, l, vectors);
    t->unpack(to, ot, m, n, vectors, WIDTH);
}

/* The formula in double, and how far the output is from it. */
static double error(const at_tiles* t) {
    double worst = 0;
#define AT(x, i) (t->itemsize == sizeof(float) ? (double)(x).f32[i] : (x).f64[i])
    for (int r = 0; r < ROWS; r++) {
        double p[KEYS], sum = 0;
        for (int j = 0; j < KEYS; j++) {
            p[j] = 0;
            for (int d = 0; d < WIDTH; d++) p[j] += AT(q, r * WIDTH + d) * AT(k, j * WIDTH + d);
            sum += p[j] = exp(p[j] / 8);
        }
        for (int e = 0; e < WIDTH; e++) {
            double want = 0;
            for (int j = 0; j < KEYS; j++) want += p[j] / sum * AT(v, j * WIDTH + e);
            const double off = fabs(AT(out, r * WIDTH + e) - want);
            if (!(off <= worst)) worst = off == off ? off : INFINITY;
        }
    }
    return worst;
}

static uint64_t hash_of(const void* data, size_t bytes, uint64_t hash) {
    for (size_t x = 0; x < bytes; x++) hash = (hash ^ ((const unsigned char*)data)[x]) * 0x100000001b3u;
    return hash;
}

int main(void) {
    uint64_t with_fma = 0;
    int wrong = 0;
    for (int x = 0; x < at_isa_count(); x++) {
        const at_isa* isa = at_isa_at(x);
        if (!at_isa_supported(x)) {
            printf("%s not here\n", isa->name);
            continue;
        }
        uint64_t hash = 0xcbf29ce484222325u;
        state = 0;
        const at_tiles* tables[] = {isa->f32, isa->f64};
        for (int kind = 0; kind < 2; kind++) {
            const at_tiles* t = tables[kind];
            const int block = t->lanes * t->max_vectors;
            fill(&q, t->itemsize, ROWS * WIDTH);
            fill(&k, t->itemsize, KEYS * WIDTH);
            fill(&v, t->itemsize, KEYS * WIDTH);
            for (int first = 0; first < ROWS; first += block)
                attend(t, first, ROWS - first < block ? ROWS - first : block);
            wrong |= !(error(t) <= (t->itemsize == sizeof(float) ? 6e-7 : 2e-15));
            hash = hash_of(&out, ROWS * WIDTH * t->itemsize, hash);
        }
        printf("%s %016" PRIx64 "\n", isa->name, hash);
        if (strcmp(isa->name, "generic") == 0) continue;
        wrong |= with_fma && hash != with_fma;
        with_fma = hash;
    }
    puts(wrong ? "WRONG" : "ok");
    return wrong;
}
