/* Generic vocabulary: 4 floats or 2 doubles per vector in the compiler's vector extension, no flag of any ISA, no
 * FMA. Runs everywhere; its bits are its own (kernels.h, ORDER). */
#include "common.h"

#define IN_REGISTER(x) (void)(x)

#define GENERIC_VOCABULARY(P, REAL, INT, UINT, N, BITS, MAGIC, MIN)                                                     \
    typedef REAL P##_vec __attribute__((vector_size(16)));                                                              \
    typedef INT P##_mask __attribute__((vector_size(16)));                                                              \
    typedef UINT P##_bits __attribute__((vector_size(16)));                                                             \
    INLINE P##_vec P##_load(const REAL* p) { return *(const P##_vec*)p; }                                               \
    INLINE P##_vec P##_loadu(const REAL* p) {                                                                           \
        P##_vec x;                                                                                                      \
        memcpy(&x, p, sizeof x);                                                                                        \
        return x;                                                                                                       \
    }                                                                                                                   \
    INLINE void P##_store(REAL* p, P##_vec x) { *(P##_vec*)p = x; }                                                     \
    INLINE void P##_storeu(REAL* p, P##_vec x) { memcpy(p, &x, sizeof x); }                                             \
    INLINE P##_vec P##_load_part(const REAL* p, ptrdiff_t n) {                                                          \
        P##_vec x = {0};                                                                                                \
        for (ptrdiff_t i = 0; i < n; i++) x[i] = p[i];                                                                  \
        return x;                                                                                                       \
    }                                                                                                                   \
    INLINE void P##_store_part(REAL* p, P##_vec x, ptrdiff_t n) {                                                       \
        for (ptrdiff_t i = 0; i < n; i++) p[i] = x[i];                                                                  \
    }                                                                                                                   \
    INLINE P##_vec P##_set1(REAL x) { return x - (P##_vec){0}; } /* not +: -0.0 must stay -0.0 */                       \
    INLINE P##_vec P##_add(P##_vec a, P##_vec b) { return a + b; }                                                      \
    INLINE P##_vec P##_sub(P##_vec a, P##_vec b) { return a - b; }                                                      \
    INLINE P##_vec P##_mul(P##_vec a, P##_vec b) { return a * b; }                                                      \
    INLINE P##_vec P##_div(P##_vec a, P##_vec b) { return a / b; }                                                      \
    INLINE P##_vec P##_fma(P##_vec a, P##_vec b, P##_vec c) { return a * b + c; }                                       \
    INLINE P##_vec P##_select(P##_mask k, P##_vec a, P##_vec b) {                                                       \
        return (P##_vec)((k & (P##_mask)a) | (~k & (P##_mask)b));                                                       \
    }                                                                                                                   \
    INLINE P##_vec P##_max(P##_vec a, P##_vec b) { return P##_select((P##_mask)(a > b), a, b); }                        \
    INLINE P##_vec P##_min(P##_vec a, P##_vec b) { return P##_select((P##_mask)(a < b), a, b); }                        \
    INLINE P##_mask P##_equal(P##_vec a, P##_vec b) { return (P##_mask)(a == b); }                                      \
    INLINE P##_mask P##_above(P##_vec a, P##_vec b) { return (P##_mask)(a > b); }                                       \
    INLINE int P##_any_above(P##_vec a, REAL b) {                                                                       \
        int any = 0;                                                                                                    \
        for (int i = 0; i < N; i++) any |= a[i] > b;                                                                    \
        return any;                                                                                                     \
    }                                                                                                                   \
    INLINE P##_mask P##_infinite(P##_vec a) {                                                                           \
        const P##_vec top = P##_set1((REAL)INFINITY);                                                                   \
        return (P##_mask)(a == top) | (P##_mask)(a == -top);                                                            \
    }                                                                                                                   \
    INLINE P##_vec P##_abs(P##_vec a) { return (P##_vec)((P##_bits)a & ~(P##_bits)P##_set1(-(REAL)0.0)); }              \
    INLINE P##_vec P##_copy_sign(P##_vec a, P##_vec b) {                                                                \
        return (P##_vec)((P##_bits)P##_abs(a) | ((P##_bits)b & (P##_bits)P##_set1(-(REAL)0.0)));                        \
    }                                                                                                                   \
    INLINE P##_mask P##_minus_zero(P##_vec a) { return (P##_mask)((P##_bits)a == (P##_bits)P##_set1(-(REAL)0.0)); }     \
    /* Nearest even by the constant whose last place is 1; right for |x| < 2^(BITS - 1), and scale_from gives 0       \
     * long before that. */ \
    INLINE P##_vec P##_round(P##_vec x) { return x + P##_set1(MAGIC) - P##_set1(MAGIC); }                               \
    INLINE P##_vec P##_scale_from(P##_vec p, P##_vec n, P##_vec x) {                                                    \
        const P##_bits shift = (P##_bits)(n + P##_set1(MAGIC)) << BITS;                                                 \
        const P##_vec scaled = (P##_vec)((P##_bits)p + shift);                                                          \
        const P##_mask tiny = (P##_mask)(x < P##_set1(MIN)), number = (P##_mask)(x == x);                               \
        return P##_select(tiny, P##_set1(0), P##_select(number, scaled, x));                                            \
    }                                                                                                                   \
    INLINE P##_mask P##_bit(const uint32_t* words, int j) {                                                             \
        P##_mask k;                                                                                                     \
        UNROLL(4)                                                                                                       \
        for (int i = 0; i < N; i++) k[i] = -(INT)(words[i] >> j & 1);                                                   \
        return k;                                                                                                       \
    }                                                                                                                   \
    INLINE void P##_transpose(P##_vec r[N]) {                                                                           \
        REAL from[N][N], to[N][N];                                                                                      \
        memcpy(from, r, sizeof from);                                                                                   \
        UNROLL(4)                                                                                                       \
        for (int i = 0; i < N; i++) UNROLL(4)                                                                           \
        for (int c = 0; c < N; c++) to[i][c] = from[c][i];                                                              \
        memcpy(r, to, sizeof to);                                                                                       \
    }

GENERIC_VOCABULARY(f32v, float, int32_t, uint32_t, 4, 23, 12582912.0f, EXP2_MIN_F32)
GENERIC_VOCABULARY(f64v, double, int64_t, uint64_t, 2, 52, 6755399441055744.0, EXP2_MIN_F64)

INLINE f32v_vec f32v_load_f16(const uint16_t* p) {
    return (f32v_vec){at_float_of_f16(p[0]), at_float_of_f16(p[1]), at_float_of_f16(p[2]), at_float_of_f16(p[3])};
}
INLINE f32v_vec f32v_load_bf16(const uint16_t* p) {
    return (f32v_vec){at_float_of_bf16(p[0]), at_float_of_bf16(p[1]), at_float_of_bf16(p[2]), at_float_of_bf16(p[3])};
}
INLINE f32v_vec f32v_bf16_first(f32v_vec x) {
    uint16_t pairs[8];
    memcpy(pairs, &x, sizeof pairs);
    const uint16_t first[4] = {pairs[0], pairs[2], pairs[4], pairs[6]};
    return f32v_load_bf16(first);
}
INLINE f32v_vec f32v_bf16_second(f32v_vec x) {
    uint16_t pairs[8];
    memcpy(pairs, &x, sizeof pairs);
    const uint16_t second[4] = {pairs[1], pairs[3], pairs[5], pairs[7]};
    return f32v_load_bf16(second);
}

#define READS_STORED
#define REAL float
#define LARGEST FLT_MAX
#define LANES 4
#define V(name) f32v_##name
#define T(name) f32_##name
#define TILES_3 DRIVERS_OF(3, 4, UP_TO_4)
#define TILES_2 DRIVERS_OF(2, 4, UP_TO_4)
#define TILES_1 DRIVERS_OF(1, 8, UP_TO_8)
#define FEW_TILES FEW_OF(1, 8, 8) FEW_OF(2, 4, 4) FEW_OF(3, 4, 2) FEW_OF(4, 2, 2)
#define FEW_DIRECT 0
#define OUTER_VECTORS 2
#define PEAK_CHAINS 12
#define EXP2_LIST EXP2_F32
#include "tiles.inc"

#define REAL double
#define LARGEST DBL_MAX
#define LANES 2
#define V(name) f64v_##name
#define T(name) f64_##name
#define TILES_3 DRIVERS_OF(3, 4, UP_TO_4)
#define TILES_2 DRIVERS_OF(2, 4, UP_TO_4)
#define TILES_1 DRIVERS_OF(1, 8, UP_TO_8)
#define FEW_TILES FEW_OF(1, 8, 8) FEW_OF(2, 4, 4) FEW_OF(3, 4, 2) FEW_OF(4, 2, 2)
#define FEW_DIRECT 0
#define OUTER_VECTORS 2
#define PEAK_CHAINS 12
#define EXP2_LIST EXP2_F64
#include "tiles.inc"

/* ---- angles: what they need beyond the double vocabulary ---- */
/* The halves of x, 26 bits each, whose products are exact (Veltkamp); |x| < 2^996. */
INLINE f64v_vec f64v_upper_half(f64v_vec x) {
    const f64v_vec wide = x * 0x1.0000002p27;
    return wide - (wide - x);
}
/* a * b - ab, exact without FMA (Dekker). */
INLINE f64v_vec f64v_product_error(f64v_vec a, f64v_vec b, f64v_vec ab) {
    const f64v_vec a1 = f64v_upper_half(a), a2 = a - a1;
    const f64v_vec b1 = f64v_upper_half(b), b2 = b - b1;
    return a2 * b2 - (((ab - a1 * b1) - a2 * b1) - a1 * b2);
}
INLINE f64v_vec f64v_swap_pairs(f64v_vec x) { return (f64v_vec){x[1], x[0]}; }
/* p[2 i] = a[i], p[2 i + 1] = b[i]. */
INLINE void f64v_store_pairs(double* p, f64v_vec a, f64v_vec b) {
    f64v_store(p, (f64v_vec){a[0], b[0]});
    f64v_store(p + 2, (f64v_vec){a[1], b[1]});
}
INLINE f64v_vec f64v_load_f32_part(const float* p, ptrdiff_t n) {
    return (f64v_vec){n > 0 ? (double)p[0] : 0, n > 1 ? (double)p[1] : 0};
}
INLINE f64v_vec f64v_load_f32(const float* p) { return f64v_load_f32_part(p, 2); }
INLINE void f64v_store_f32_part(float* p, f64v_vec x, ptrdiff_t n) {
    for (ptrdiff_t i = 0; i < n; i++) p[i] = (float)x[i];
}
INLINE void f64v_store_f32(float* p, f64v_vec x) { f64v_store_f32_part(p, x, 2); }
/* Bit `bit` of a whole number below 2^51, in two's complement: adding 1.5 * 2^52 puts its units into the last place. */
INLINE f64v_mask f64v_has_bit(f64v_vec n, int bit) {
    const f64v_bits units = (f64v_bits)(n + f64v_set1(0x1.8p52));
    return -(f64v_mask)(units >> bit & 1);
}

INLINE f64v_vec f64v_sign_from(f64v_vec a, f64v_vec b) { return f64v_copy_sign(a, b); }
INLINE f64v_vec f64v_power_of_two(f64v_vec x) {
    return (f64v_vec)((f64v_bits)x & (f64v_bits)f64v_set1(INFINITY)); /* the bits of the exponent */
}
#define LANES 2
#define V(name) f64v_##name
#include "rounded16.inc"

/* float16 one by one: normal numbers, which nearly all are, by arithmetic on the bits of doubles. Biases: 1023 - 15. */
INLINE double generic_double_of_f16(uint16_t half) {
    if (((half + 0x400) & 0x7c00) <= 0x400) return at_float_of_f16(half);
    return at_double_of((uint64_t)(half & 0x8000) << 48 | (((uint64_t)(half & 0x7fff) << 42) + (UINT64_C(1008) << 52)));
}
INLINE uint16_t generic_f16_of_double(double x) {
    const uint64_t bits = at_long_bits_of(x), rest = bits & (UINT64_MAX >> 1);
    if (rest - (UINT64_C(1009) << 52) >= UINT64_C(30) << 52) return at_f16_of_double(x);
    const uint64_t half = (rest + 0x1ffffffffff + (rest >> 42 & 1)) >> 42;
    return (uint16_t)((bits >> 48 & 0x8000) | (half - (1008 << 10)));
}
INLINE f64v_vec f64v_load_f16(const uint16_t* p) {
    return (f64v_vec){generic_double_of_f16(p[0]), generic_double_of_f16(p[1])};
}
INLINE void f64v_store_f16(uint16_t* p, f64v_vec x) {
    for (int i = 0; i < 2; i++) p[i] = generic_f16_of_double(x[i]);
}
INLINE f64v_vec f64v_load_bf16(const uint16_t* p) { return (f64v_vec){at_float_of_bf16(p[0]), at_float_of_bf16(p[1])}; }
INLINE void f64v_store_bf16(uint16_t* p, f64v_vec x) {
    const f64v_vec rounded = f64v_rounded_bf16(x);
    for (int i = 0; i < 2; i++) p[i] = (uint16_t)(at_bits_of((float)rounded[i]) >> 16);
}

#include "angles.inc"

const at_isa at_generic = {"generic", &f32_tiles, &f64_tiles, &angles_table};
