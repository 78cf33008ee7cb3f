/* Boolean mask rows, of which any nonzero byte counts as true: to bit words, 32 keys of a row in one word, words lying
 * as [word][row] so that one load gives the words of a vector of rows; and to the one run of keys that a row may be. */
#include <string.h>

#include "kernels.h"

#if defined(__SSE2__)
#include <emmintrin.h>

static uint32_t word_of_32(const char* p) {
    const __m128i zero = _mm_setzero_si128();
    const __m128i low = _mm_loadu_si128((const __m128i*)p), high = _mm_loadu_si128((const __m128i*)(p + 16));
    const uint32_t off_low = (uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(low, zero));
    const uint32_t off_high = (uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(high, zero));
    return ~(off_low | off_high << 16);
}
#else
static uint32_t word_of(const char* p, ptrdiff_t key_stride, ptrdiff_t keys);
static uint32_t word_of_32(const char* p) { return word_of(p, 1, AT_WORD); }
#endif

static uint32_t word_of(const char* p, ptrdiff_t key_stride, ptrdiff_t keys) {
    uint32_t word = 0;
    for (ptrdiff_t j = 0; j < keys; j++) word |= (uint32_t)(p[j * key_stride] != 0) << j;
    return word;
}

void at_mask_words(uint32_t* words, const char* const* rows, ptrdiff_t key_stride, ptrdiff_t n_rows, ptrdiff_t pitch,
                   ptrdiff_t keys) {
    for (ptrdiff_t r = 0; r < n_rows; r++) {
        const int repeated = r > 0 && rows[r] == rows[r - 1]; /* one row for all: read it once */
        for (ptrdiff_t j = 0, w = 0; j < keys; j += AT_WORD, w++) {
            uint32_t* to = words + w * pitch + r;
            const char* from = rows[r] + j * key_stride;
            const ptrdiff_t n = keys - j < AT_WORD ? keys - j : AT_WORD;
            *to = repeated ? to[-1] : key_stride == 1 && n == AT_WORD ? word_of_32(from) : word_of(from, key_stride, n);
        }
    }
}

/* Bytes that are looked at together. The two loops below have no exit, so that the compiler makes vectors of them. */
#define BLOCK 64

static int any_in_block(const char* p) {
    unsigned char seen = 0;
    for (int j = 0; j < BLOCK; j++) seen |= (unsigned char)p[j];
    return seen != 0;
}

static int all_in_block(const char* p) {
    unsigned char least = 255;
    for (int j = 0; j < BLOCK; j++) least = (unsigned char)p[j] < least ? (unsigned char)p[j] : least;
    return least != 0;
}

int at_mask_run(const char* row, ptrdiff_t key_stride, ptrdiff_t keys, ptrdiff_t* lo, ptrdiff_t* hi) {
    const int in_blocks = key_stride == 1;
    ptrdiff_t first = 0, end = keys;
    while (in_blocks && end - first >= BLOCK && !any_in_block(row + first)) first += BLOCK;
    while (first < end && !row[first * key_stride]) first++;
    while (in_blocks && end - first >= BLOCK && !any_in_block(row + end - BLOCK)) end -= BLOCK;
    while (first < end && !row[(end - 1) * key_stride]) end--;

    ptrdiff_t j = first;
    while (in_blocks && end - j >= BLOCK && all_in_block(row + j)) j += BLOCK;
    while (j < end && row[j * key_stride]) j++;
    if (j < end) return 0;
    *lo = first < end ? first : 0;
    *hi = first < end ? end : 0;
    return 1;
}
