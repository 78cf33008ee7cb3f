/* AVX-512 vocabulary (F, DQ, BW, VL): 16 floats or 8 doubles per vector, 32 registers, masks in k registers.
 * Empty for other processors: a universal build of macOS compiles every file for both of its own. */
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>

#include "common.h"

/* Keeps a broadcast in a register. Left to itself the compiler repeats it as a memory operand of each FMA, which
 * costs a load per FMA; only the one-vector tiles want that. */
#define IN_REGISTER(x) __asm__("" : "+v"(x))

/* ---- float ---- */
typedef __m512 f32v_vec;
typedef __mmask16 f32v_mask;
INLINE __m512 f32v_load(const float* p) { return _mm512_load_ps(p); }
INLINE __m512 f32v_loadu(const float* p) { return _mm512_loadu_ps(p); }
INLINE __m512 f32v_load_part(const float* p, ptrdiff_t n) {
    return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
}
INLINE void f32v_store(float* p, __m512 x) { _mm512_store_ps(p, x); }
INLINE void f32v_storeu(float* p, __m512 x) { _mm512_storeu_ps(p, x); }
INLINE void f32v_store_part(float* p, __m512 x, ptrdiff_t n) {
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), x);
}
INLINE __m512 f32v_set1(float x) { return _mm512_set1_ps(x); }
INLINE __m512 f32v_add(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }
INLINE __m512 f32v_sub(__m512 a, __m512 b) { return _mm512_sub_ps(a, b); }
INLINE __m512 f32v_mul(__m512 a, __m512 b) { return _mm512_mul_ps(a, b); }
INLINE __m512 f32v_div(__m512 a, __m512 b) { return _mm512_div_ps(a, b); }
INLINE __m512 f32v_fma(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
INLINE __m512 f32v_max(__m512 a, __m512 b) { return _mm512_max_ps(a, b); }
INLINE __m512 f32v_min(__m512 a, __m512 b) { return _mm512_min_ps(a, b); }
INLINE __mmask16 f32v_equal(__m512 a, __m512 b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
INLINE __mmask16 f32v_above(__m512 a, __m512 b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
INLINE int f32v_any_above(__m512 a, float b) { return f32v_above(a, _mm512_set1_ps(b)) != 0; }
INLINE __mmask16 f32v_infinite(__m512 a) { return _mm512_fpclass_ps_mask(a, 0x18); }
INLINE __mmask16 f32v_minus_zero(__m512 a) { return _mm512_fpclass_ps_mask(a, 0x04); }
INLINE __m512 f32v_select(__mmask16 k, __m512 a, __m512 b) { return _mm512_mask_blend_ps(k, b, a); }
INLINE __m512 f32v_abs(__m512 a) { return _mm512_abs_ps(a); }
INLINE __m512 f32v_copy_sign(__m512 a, __m512 b) { /* bitwise select: the sign bit of b, the rest of a */
    const __m512i sign = _mm512_set1_epi32(INT32_MIN);
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(sign, _mm512_castps_si512(b), _mm512_castps_si512(a), 0xca));
}
INLINE __m512 f32v_round(__m512 x) { return _mm512_roundscale_ps(x, 8); }
/* p * 2^n, 0 where x is below the power of the smallest weight; NaN in x stays NaN in p and passes. */
INLINE __m512 f32v_scale_from(__m512 p, __m512 n, __m512 x) {
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(EXP2_MIN_F32), _CMP_NLT_UQ), p, n);
}
INLINE __mmask16 f32v_bit(const uint32_t* words, int j) {
    return _mm512_test_epi32_mask(_mm512_load_si512(words), _mm512_set1_epi32((int)(1u << j)));
}
INLINE void f32v_transpose(__m512 r[16]) {
    __m512 t[16];
    UNROLL(16)
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    UNROLL(16)
    for (int i = 0; i < 16; i++) { /* 4 x 4 blocks: rows 4g .. 4g + 3, column i % 4 of each lane */
        const int g = i / 4, c = i % 4;
        const __m512d a = _mm512_castps_pd(t[4 * g + c / 2]), b = _mm512_castps_pd(t[4 * g + 2 + c / 2]);
        r[i] = _mm512_castpd_ps(c % 2 ? _mm512_unpackhi_pd(a, b) : _mm512_unpacklo_pd(a, b));
    }
    UNROLL(16)
    for (int c = 0; c < 4; c++) {
        t[c] = _mm512_shuffle_f32x4(r[c], r[4 + c], 0x88);
        t[4 + c] = _mm512_shuffle_f32x4(r[c], r[4 + c], 0xdd);
        t[8 + c] = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0x88);
        t[12 + c] = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0xdd);
    }
    UNROLL(16)
    for (int c = 0; c < 8; c++) {
        r[c] = _mm512_shuffle_f32x4(t[c], t[8 + c], 0x88);
        r[8 + c] = _mm512_shuffle_f32x4(t[c], t[8 + c], 0xdd);
    }
}

INLINE __m512 f32v_load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
INLINE __m512 f32v_load_f16_part(const uint16_t* p, ptrdiff_t n) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), p));
}
INLINE __m512 f32v_bf16_first(__m512 x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(x), 16)); }
INLINE __m512 f32v_bf16_second(__m512 x) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(INT32_MIN >> 15)));
}
INLINE __m512 f32v_load_bf16(const uint16_t* p) {
    return f32v_bf16_first(_mm512_castsi512_ps(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p))));
}
INLINE __m512 f32v_load_bf16_part(const uint16_t* p, ptrdiff_t n) {
    const __m256i x = _mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), p);
    return f32v_bf16_first(_mm512_castsi512_ps(_mm512_cvtepu16_epi32(x)));
}
INLINE void f32v_store_f16(uint16_t* p, __m512 x) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

#define READS_STORED
#define HAS_STORE_F16
#define HAS_PARTS
#define REAL float
#define LARGEST FLT_MAX
#define LANES 16
#define V(name) f32v_##name
#define T(name) f32_##name
#define TILES_3 DRIVERS_OF(3, 8, UP_TO_8)
#define TILES_2 DRIVERS_OF(2, 12, UP_TO_12)
#define TILES_1 DRIVERS_OF(1, 12, UP_TO_12)
#define FEW_TILES FEW_OF(1, 6, 8) FEW_OF(2, 4, 8) FEW_OF(3, 2, 4) FEW_OF(4, 2, 4)
#define FEW_DIRECT 1
#define OUTER_VECTORS 4
#define PEAK_CHAINS 12
#define EXP2_LIST EXP2_F32
#include "tiles.inc"

/* ---- double ---- */
typedef __m512d f64v_vec;
typedef __mmask8 f64v_mask;
INLINE __m512d f64v_load(const double* p) { return _mm512_load_pd(p); }
INLINE __m512d f64v_loadu(const double* p) { return _mm512_loadu_pd(p); }
INLINE __m512d f64v_load_part(const double* p, ptrdiff_t n) {
    return _mm512_maskz_loadu_pd((__mmask8)((1u << n) - 1), p);
}
INLINE void f64v_store(double* p, __m512d x) { _mm512_store_pd(p, x); }
INLINE void f64v_storeu(double* p, __m512d x) { _mm512_storeu_pd(p, x); }
INLINE void f64v_store_part(double* p, __m512d x, ptrdiff_t n) {
    _mm512_mask_storeu_pd(p, (__mmask8)((1u << n) - 1), x);
}
INLINE __m512d f64v_set1(double x) { return _mm512_set1_pd(x); }
INLINE __m512d f64v_add(__m512d a, __m512d b) { return _mm512_add_pd(a, b); }
INLINE __m512d f64v_sub(__m512d a, __m512d b) { return _mm512_sub_pd(a, b); }
INLINE __m512d f64v_mul(__m512d a, __m512d b) { return _mm512_mul_pd(a, b); }
INLINE __m512d f64v_div(__m512d a, __m512d b) { return _mm512_div_pd(a, b); }
INLINE __m512d f64v_fma(__m512d a, __m512d b, __m512d c) { return _mm512_fmadd_pd(a, b, c); }
INLINE __m512d f64v_max(__m512d a, __m512d b) { return _mm512_max_pd(a, b); }
INLINE __m512d f64v_min(__m512d a, __m512d b) { return _mm512_min_pd(a, b); }
INLINE __mmask8 f64v_equal(__m512d a, __m512d b) { return _mm512_cmp_pd_mask(a, b, _CMP_EQ_OQ); }
INLINE __mmask8 f64v_above(__m512d a, __m512d b) { return _mm512_cmp_pd_mask(a, b, _CMP_GT_OQ); }
INLINE int f64v_any_above(__m512d a, double b) { return f64v_above(a, _mm512_set1_pd(b)) != 0; }
INLINE __mmask8 f64v_infinite(__m512d a) { return _mm512_fpclass_pd_mask(a, 0x18); }
INLINE __mmask8 f64v_minus_zero(__m512d a) { return _mm512_fpclass_pd_mask(a, 0x04); }
INLINE __m512d f64v_select(__mmask8 k, __m512d a, __m512d b) { return _mm512_mask_blend_pd(k, b, a); }
INLINE __m512d f64v_abs(__m512d a) { return _mm512_abs_pd(a); }
INLINE __m512d f64v_copy_sign(__m512d a, __m512d b) {
    const __m512i sign = _mm512_set1_epi64(INT64_MIN);
    return _mm512_castsi512_pd(_mm512_ternarylogic_epi64(sign, _mm512_castpd_si512(b), _mm512_castpd_si512(a), 0xca));
}
INLINE __m512d f64v_round(__m512d x) { return _mm512_roundscale_pd(x, 8); }
INLINE __m512d f64v_scale_from(__m512d p, __m512d n, __m512d x) {
    return _mm512_maskz_scalef_pd(_mm512_cmp_pd_mask(x, _mm512_set1_pd(EXP2_MIN_F64), _CMP_NLT_UQ), p, n);
}
INLINE __mmask8 f64v_bit(const uint32_t* words, int j) {
    return _mm256_test_epi32_mask(_mm256_load_si256((const __m256i*)words), _mm256_set1_epi32((int)(1u << j)));
}
INLINE void f64v_transpose(__m512d r[8]) {
    __m512d t[8];
    UNROLL(8)
    for (int i = 0; i < 4; i++) {
        t[2 * i] = _mm512_unpacklo_pd(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_pd(r[2 * i], r[2 * i + 1]);
    }
    UNROLL(8)
    for (int c = 0; c < 2; c++) {
        r[c] = _mm512_shuffle_f64x2(t[c], t[2 + c], 0x88);
        r[2 + c] = _mm512_shuffle_f64x2(t[c], t[2 + c], 0xdd);
        r[4 + c] = _mm512_shuffle_f64x2(t[4 + c], t[6 + c], 0x88);
        r[6 + c] = _mm512_shuffle_f64x2(t[4 + c], t[6 + c], 0xdd);
    }
    UNROLL(8)
    for (int c = 0; c < 4; c++) {
        t[c] = _mm512_shuffle_f64x2(r[c], r[4 + c], 0x88);
        t[4 + c] = _mm512_shuffle_f64x2(r[c], r[4 + c], 0xdd);
    }
    UNROLL(8)
    for (int c = 0; c < 8; c++) r[c] = t[c];
}

#define REAL double
#define LARGEST DBL_MAX
#define LANES 8
#define V(name) f64v_##name
#define T(name) f64_##name
#define TILES_3 DRIVERS_OF(3, 8, UP_TO_8)
#define TILES_2 DRIVERS_OF(2, 12, UP_TO_12)
#define TILES_1 DRIVERS_OF(1, 12, UP_TO_12)
#define FEW_TILES FEW_OF(1, 6, 8) FEW_OF(2, 4, 8) FEW_OF(3, 2, 4) FEW_OF(4, 2, 4)
#define FEW_DIRECT 1
#define OUTER_VECTORS 4
#define PEAK_CHAINS 12
#define EXP2_LIST EXP2_F64
#include "tiles.inc"

/* ---- angles: what they need beyond the double vocabulary ---- */
INLINE __m512d f64v_product_error(__m512d a, __m512d b, __m512d ab) { return _mm512_fmsub_pd(a, b, ab); }
INLINE __m512d f64v_swap_pairs(__m512d x) { return _mm512_permute_pd(x, 0x55); }
/* p[2 i] = a[i], p[2 i + 1] = b[i]. */
INLINE void f64v_store_pairs(double* p, __m512d a, __m512d b) {
    const __m512i low = _mm512_set_epi64(11, 3, 10, 2, 9, 1, 8, 0), high = _mm512_set_epi64(15, 7, 14, 6, 13, 5, 12, 4);
    _mm512_store_pd(p, _mm512_permutex2var_pd(a, low, b));
    _mm512_store_pd(p + 8, _mm512_permutex2var_pd(a, high, b));
}
INLINE __m512d f64v_load_f32(const float* p) { return _mm512_cvtps_pd(_mm256_loadu_ps(p)); }
INLINE __m512d f64v_load_f32_part(const float* p, ptrdiff_t n) {
    return _mm512_cvtps_pd(_mm256_maskz_loadu_ps((__mmask8)((1u << n) - 1), p));
}
INLINE void f64v_store_f32(float* p, __m512d x) { _mm256_storeu_ps(p, _mm512_cvtpd_ps(x)); }
INLINE void f64v_store_f32_part(float* p, __m512d x, ptrdiff_t n) {
    _mm256_mask_storeu_ps(p, (__mmask8)((1u << n) - 1), _mm512_cvtpd_ps(x));
}
/* Bit `bit` of a whole number below 2^51, in two's complement: adding 1.5 * 2^52 puts its units into the last place. */
INLINE __mmask8 f64v_has_bit(__m512d n, int bit) {
    const __m512i units = _mm512_castpd_si512(_mm512_add_pd(n, _mm512_set1_pd(0x1.8p52)));
    return _mm512_test_epi64_mask(units, _mm512_set1_epi64(1LL << bit));
}

INLINE __m512d f64v_sign_from(__m512d a, __m512d b) { return f64v_copy_sign(a, b); }
INLINE __m512d f64v_power_of_two(__m512d x) {
    return _mm512_and_pd(x, _mm512_set1_pd(INFINITY)); /* the bits of the exponent */
}
#define LANES 8
#define V(name) f64v_##name
#include "rounded16.inc"

INLINE __m512d f64v_load_f16(const uint16_t* p) {
    return _mm512_cvtps_pd(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)));
}
INLINE void f64v_store_f16(uint16_t* p, __m512d x) { /* rounded to odd in between: at_odd in halves.h */
    const __m256i toward_0 = _mm256_castps_si256(_mm512_cvt_roundpd_ps(x, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC));
    const __mmask8 lost = _mm512_test_epi64_mask(_mm512_castpd_si512(x), _mm512_set1_epi64(0x1fffffff));
    const __m256i odd = _mm256_mask_or_epi32(toward_0, lost, toward_0, _mm256_set1_epi32(1));
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(_mm256_castsi256_ps(odd), _MM_FROUND_TO_NEAREST_INT));
}
INLINE __m512d f64v_load_bf16(const uint16_t* p) { /* each number behind 16 bits of 0 */
    const __m256i from = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)p));
    const __m256i at = _mm256_set_epi16(7, 0, 6, 0, 5, 0, 4, 0, 3, 0, 2, 0, 1, 0, 0, 0);
    return _mm512_cvtps_pd(_mm256_castsi256_ps(_mm256_maskz_permutexvar_epi16(0xaaaa, at, from)));
}
INLINE void f64v_store_bf16(uint16_t* p, __m512d x) {
    const __m256i bits = _mm256_castps_si256(_mm512_cvtpd_ps(f64v_rounded_bf16(x)));
    const __m256i upper = _mm256_set_epi16(0, 0, 0, 0, 0, 0, 0, 0, 15, 13, 11, 9, 7, 5, 3, 1);
    _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(_mm256_permutexvar_epi16(upper, bits)));
}

#include "angles.inc"

const at_isa at_avx512 = {"avx512", &f32_tiles, &f64_tiles, &angles_table};
#endif
