/* Arrays of float16 and bfloat16 to float and back. Widening is exact. Narrowing rounds once, to nearest even: what is too
 * large becomes infinite, what is small subnormal. Written without branches, for the compiler's own vectors. */
#include "halves.h"
#include "kernels.h"

void at_widen_f16(float* to, const uint16_t* from, ptrdiff_t n) {
    for (ptrdiff_t i = 0; i < n; i++) to[i] = at_float_of_f16(from[i]);
}

void at_narrow_f16(uint16_t* to, const float* from, ptrdiff_t n) {
    for (ptrdiff_t i = 0; i < n; i++) {
        const uint32_t bits = at_bits_of(from[i]), rest = bits & 0x7fffffff;
        const uint32_t normal = (rest - (112u << 23) + 0xfff + (rest >> 13 & 1)) >> 13;
        const uint32_t small = at_bits_of(at_float_of(rest) + 0.5f) - 0x3f000000; /* the sum has steps of 2^-24 */
        const uint32_t special = rest > 0x7f800000 ? 0x7e00 | (rest >> 13 & 0x1ff) : 0x7c00;
        const uint32_t found = at_choose(rest < 0x38800000, small, at_choose(rest < 0x477ff000, normal, special));
        to[i] = (uint16_t)(bits >> 16 & 0x8000) | (uint16_t)found;
    }
}

void at_widen_bf16(float* to, const uint16_t* from, ptrdiff_t n) {
    for (ptrdiff_t i = 0; i < n; i++) to[i] = at_float_of_bf16(from[i]);
}

void at_narrow_bf16(uint16_t* to, const float* from, ptrdiff_t n) {
    for (ptrdiff_t i = 0; i < n; i++) {
        const uint32_t bits = at_bits_of(from[i]);
        const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, nan = bits >> 16 | 0x40;
        to[i] = (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);
    }
}
