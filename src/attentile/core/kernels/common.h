/* What every <isa>.c shares: compiler words, repetition macros and the constants of the arithmetic. */
#ifndef AT_COMMON_H
#define AT_COMMON_H

#include <float.h>
#include <math.h>
#include <string.h>

#include "halves.h"
#include "kernels.h"

#define INLINE static inline __attribute__((always_inline))
#define NOINLINE __attribute__((noinline))
#define PRAGMA(x) _Pragma(#x)
#ifdef __clang__
#define UNROLL(n) PRAGMA(clang loop unroll(full))
#else
#define UNROLL(n) PRAGMA(GCC unroll n)
#endif

/* Around a table to which an instruction set may add entries of its own: that these replace others is meant. */
#define OWN_ENTRIES_BEGIN PRAGMA(GCC diagnostic push) PRAGMA(GCC diagnostic ignored "-Woverride-init")
#define OWN_ENTRIES_END PRAGMA(GCC diagnostic pop)

/* The part of the rows that falls to keys j .. j + n of `keys`, into L2 while a tile computes. */
INLINE void at_fetch(const at_ahead* ahead, ptrdiff_t j, ptrdiff_t n, ptrdiff_t keys) {
    for (ptrdiff_t r = j * ahead->n_rows / keys; r < (j + n) * ahead->n_rows / keys; r++) {
        const char* row = ahead->rows ? ahead->rows[r] + ahead->offset : ahead->data + r * ahead->stride;
        for (ptrdiff_t x = 0; x < ahead->bytes; x += 64) __builtin_prefetch(row + x, 0, 2);
    }
}

#define MAX_TILE 12 /* keys in the longest tile of any ISA */

#define UP_TO_2(M, V) M(V, 1) M(V, 2)
#define UP_TO_4(M, V) M(V, 1) M(V, 2) M(V, 3) M(V, 4)
#define UP_TO_6(M, V) UP_TO_4(M, V) M(V, 5) M(V, 6)
#define UP_TO_8(M, V) UP_TO_6(M, V) M(V, 7) M(V, 8)
#define UP_TO_10(M, V) UP_TO_8(M, V) M(V, 9) M(V, 10)
#define UP_TO_12(M, V) UP_TO_10(M, V) M(V, 11) M(V, 12)

/* 2^f on [-1/2, 1/2], highest power first, relative minimax with constant term 1 (Remez exchange):
 * degree 6 in float, 1.01 ULP after rounding; degree 11 in double, 1.0 ULP. */
#define EXP2_F32 0.000155946997f, 0.00134066434f, 0.00961769279f, 0.0555031039f, 0.240226522f, 0.693147242f, 1.0f
#define EXP2_F64                                                                                                       \
    0x1.c062d7c810824p-32, 0x1.e605f960b6a12p-28, 0x1.b541680643fabp-24, 0x1.62bfd49ed6ee8p-20, 0x1.ffcbee3ae07b2p-17, \
        0x1.4309130961180p-13, 0x1.5d87fe7bbbe89p-10, 0x1.3b2ab6fba1e1cp-7, 0x1.c6b08d7048f31p-5,                      \
        0x1.ebfbdff82c598p-3, 0x1.62e42fefa39f3p-1, 1.0
#define EXP2_MIN_F32 ((float)AT_MIN_POWER_F32) /* below it exp2 is exactly 0 */
#define EXP2_MIN_F64 ((double)AT_MIN_POWER_F64)

#endif
