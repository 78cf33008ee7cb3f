/* Runs of a mask row (bits.c): every run in rows of up to two blocks and a rest, with one key missing or one too many,
 * against a search key by key. Each row is an allocation of its own size, for sanitizers.
 *
 *     cc -std=c11 -I src/attentile/core/kernels tests/c/check_bits.c src/attentile/core/kernels/bits.c */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

#define MOST_KEYS 150

static int naive_run(const char* row, ptrdiff_t key_stride, ptrdiff_t keys, ptrdiff_t* lo, ptrdiff_t* hi) {
    ptrdiff_t runs = 0;
    ptrdiff_t first = 0, end = 0;
    for (ptrdiff_t j = 0; j < keys; j++) {
        if (!row[j * key_stride]) continue;
        if (j == 0 || !row[(j - 1) * key_stride]) {
            runs++;
            first = j;
        }
        end = j + 1;
    }
    if (runs > 1) return 0;
    *lo = first;
    *hi = end;
    return 1;
}

/* The row at `row`, whose keys lie `key_stride` apart: 1 if both agree. */
static int agree(const char* row, ptrdiff_t key_stride, ptrdiff_t keys) {
    ptrdiff_t lo = -1, hi = -2;
    ptrdiff_t want_lo = lo, want_hi = hi;
    const int is_run = at_mask_run(row, key_stride, keys, &lo, &hi);
    if (is_run == naive_run(row, key_stride, keys, &want_lo, &want_hi) && lo == want_lo && hi == want_hi) return 1;
    printf("%d keys, stride %d: %d, %d to %d instead of %d to %d\n", (int)keys, (int)key_stride, is_run, (int)lo,
           (int)hi, (int)want_lo, (int)want_hi);
    return 0;
}

/* Every run of `keys` keys, as it is and with each of a few keys turned over. */
static int runs_of(ptrdiff_t keys, ptrdiff_t key_stride) {
    static const char allowed[] = {1, 2, '\x80', '\xff'};
    const ptrdiff_t apart = key_stride < 0 ? -key_stride : key_stride;
    const size_t bytes = (size_t)((keys - 1) * apart + 1);
    char* data = malloc(bytes);
    char* row = key_stride < 0 ? data + bytes - 1 : data;
    int right = data != NULL;
    for (ptrdiff_t lo = 0; right && lo <= keys; lo++)
        for (ptrdiff_t hi = lo; right && hi <= keys; hi++) {
            memset(data, apart > 1, bytes); /* what lies between the keys must not count */
            for (ptrdiff_t j = 0; j < keys; j++) row[j * key_stride] = j < lo || j >= hi ? 0 : allowed[(j + lo) % 4];
            right = agree(row, key_stride, keys);
            for (ptrdiff_t j = (lo + hi) % 29; right && j < keys; j += 29) {
                const char was = row[j * key_stride];
                row[j * key_stride] = !was;
                right = agree(row, key_stride, keys);
                row[j * key_stride] = was;
            }
        }
    free(data);
    return right;
}

int main(void) {
    static const ptrdiff_t strides[] = {1, 3, -1, 0};
    ptrdiff_t lo = -1, hi = -1;
    int right = at_mask_run(NULL, 1, 0, &lo, &hi) && lo == 0 && hi == 0;
    for (ptrdiff_t keys = 1; right && keys <= MOST_KEYS; keys++)
        for (size_t s = 0; right && s < sizeof strides / sizeof *strides; s++)
            if (strides[s] == 1 || keys % 37 == 1) right = runs_of(keys, strides[s]);
    puts(right ? "ok" : "WRONG");
    return !right;
}
