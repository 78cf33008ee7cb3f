/* One number of the 16-bit formats, exact to float: float16 (1 sign, 5 exponent, 10 fraction bits) and bfloat16 (1, 8, 7).
 * Without branches, for the compiler's own vectors. */
#ifndef AT_HALVES_H
#define AT_HALVES_H

#include <stdint.h>
#include <string.h>

static inline uint32_t at_bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float at_float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Both are computed: compilers put one of ?: behind a branch, and then make no vectors. */
static inline uint32_t at_choose(int first, uint32_t a, uint32_t b) {
    const uint32_t mask = 0 - (uint32_t)first;
    return (a & mask) | (b & ~mask);
}

static inline float at_float_of_f16(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    const uint32_t normal = (rest << 13) + (112u << 23); /* exponent biases: 127 - 15 */
    const uint32_t small = at_bits_of((float)(int32_t)rest * 0x1p-24f);
    const uint32_t special = (rest << 13) | 0x7f800000;
    return at_float_of(sign | at_choose(rest < 0x0400, small, at_choose(rest < 0x7c00, normal, special)));
}

static inline float at_float_of_bf16(uint16_t half) { return at_float_of((uint32_t)half << 16); }

#endif
