/* One number of the 16-bit formats float16 (1 sign, 5 exponent, 10 fraction bits) and bfloat16 (1, 8, 7): widening is exact,
 * narrowing rounds once, to nearest even; what is too large becomes infinite, what is small subnormal. Without branches, for
 * the compiler's own vectors. */
#ifndef AT_HALVES_H
#define AT_HALVES_H

#include <math.h>
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

static inline uint64_t at_long_bits_of(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline double at_double_of(uint64_t bits) {
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* a if first is 1, b if it is 0. Both are computed: compilers put one of ?: behind a branch, and then make no vectors. */
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

static inline uint16_t at_f16_of(float x) {
    const uint32_t bits = at_bits_of(x), rest = bits & 0x7fffffff;
    const uint32_t normal = (rest - (112u << 23) + 0xfff + (rest >> 13 & 1)) >> 13;
    const uint32_t small = at_bits_of(at_float_of(rest) + 0.5f) - 0x3f000000; /* the sum has steps of 2^-24 */
    const uint32_t special = at_choose(rest > 0x7f800000, 0x7e00 | (rest >> 13 & 0x1ff), 0x7c00);
    const uint32_t found = at_choose(rest < 0x38800000, small, at_choose(rest < 0x477ff000, normal, special));
    return (uint16_t)((bits >> 16 & 0x8000) | found);
}

static inline uint16_t at_bf16_of(float x) {
    const uint32_t bits = at_bits_of(x);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, nan = bits >> 16 | 0x40;
    return (uint16_t)at_choose((bits & 0x7fffffff) > 0x7f800000, nan, rounded);
}

/* x rounded to odd: towards 0, with the last bit set wherever something was lost, which keeps the rounding to 16 bits that
 * comes next from taking it for a tie. For what is no subnormal float. */
static inline float at_odd(double x) {
    const uint64_t lost = 0x1fffffff, bits = at_long_bits_of(x);
    return (float)at_double_of((bits | (((bits & lost) + lost) & (lost + 1))) & ~lost);
}

/* Doubles rounded once. The subnormals of bfloat16 are those of float: a sum that has their steps has rounded already. */
static inline uint16_t at_f16_of_double(double x) { return at_f16_of(at_odd(x)); }

static inline uint16_t at_bf16_of_double(double x) {
    const double size = fabs(x), small = copysign((size + 0x1p-81) - 0x1p-81, x);
    const uint64_t mask = 0 - (uint64_t)(at_long_bits_of(size) < at_long_bits_of(0x1p-126));
    return at_bf16_of(at_odd(at_double_of((at_long_bits_of(small) & mask) | (at_long_bits_of(x) & ~mask))));
}

#endif
