/* AVX2 + FMA vocabulary: 8 floats or 4 doubles per vector, 16 registers, masks are vectors of all-ones lanes.
 * Empty for other processors: a universal build of macOS compiles every file for both of its own. */
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>

#include "common.h"

#define IN_REGISTER(x) __asm__("" : "+x"(x))

/* Lane masks of the first n lanes: eight (four) words starting at 8 - n. */
static const int32_t first_lanes_32[16] = {-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};
static const int64_t first_lanes_64[8] = {-1, -1, -1, -1, 0, 0, 0, 0};

/* ---- float ---- */
typedef __m256 f32v_vec;
typedef __m256 f32v_mask;
INLINE __m256i f32v_first(ptrdiff_t n) { return _mm256_loadu_si256((const __m256i*)(first_lanes_32 + 8 - n)); }
INLINE __m256 f32v_load(const float* p) { return _mm256_load_ps(p); }
INLINE __m256 f32v_loadu(const float* p) { return _mm256_loadu_ps(p); }
INLINE __m256 f32v_load_part(const float* p, ptrdiff_t n) { return _mm256_maskload_ps(p, f32v_first(n)); }
INLINE void f32v_store(float* p, __m256 x) { _mm256_store_ps(p, x); }
INLINE void f32v_storeu(float* p, __m256 x) { _mm256_storeu_ps(p, x); }
INLINE void f32v_store_part(float* p, __m256 x, ptrdiff_t n) { _mm256_maskstore_ps(p, f32v_first(n), x); }
INLINE __m256 f32v_set1(float x) { return _mm256_set1_ps(x); }
INLINE __m256 f32v_add(__m256 a, __m256 b) { return _mm256_add_ps(a, b); }
INLINE __m256 f32v_sub(__m256 a, __m256 b) { return _mm256_sub_ps(a, b); }
INLINE __m256 f32v_mul(__m256 a, __m256 b) { return _mm256_mul_ps(a, b); }
INLINE __m256 f32v_div(__m256 a, __m256 b) { return _mm256_div_ps(a, b); }
INLINE __m256 f32v_fma(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
INLINE __m256 f32v_max(__m256 a, __m256 b) { return _mm256_max_ps(a, b); }
INLINE __m256 f32v_min(__m256 a, __m256 b) { return _mm256_min_ps(a, b); }
INLINE __m256 f32v_equal(__m256 a, __m256 b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
INLINE __m256 f32v_above(__m256 a, __m256 b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
INLINE int f32v_any_above(__m256 a, float b) { return _mm256_movemask_ps(f32v_above(a, _mm256_set1_ps(b))); }
INLINE __m256 f32v_infinite(__m256 a) {
    return _mm256_cmp_ps(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a), _mm256_set1_ps(INFINITY), _CMP_EQ_OQ);
}
INLINE __m256 f32v_minus_zero(__m256 a) {
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_castps_si256(a), _mm256_set1_epi32(INT32_MIN)));
}
INLINE __m256 f32v_select(__m256 k, __m256 a, __m256 b) { return _mm256_blendv_ps(b, a, k); }
INLINE __m256 f32v_abs(__m256 a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
INLINE __m256 f32v_copy_sign(__m256 a, __m256 b) {
    return _mm256_or_ps(f32v_abs(a), _mm256_and_ps(_mm256_set1_ps(-0.0f), b));
}
INLINE __m256 f32v_round(__m256 x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
/* p * 2^n, 0 where x is below the power of the smallest weight. NaN converts to 0x80000000, whose shift is 0. */
INLINE __m256 f32v_scale_from(__m256 p, __m256 n, __m256 x) {
    const __m256i shift = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    const __m256 scaled = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), shift));
    return _mm256_andnot_ps(_mm256_cmp_ps(x, _mm256_set1_ps(EXP2_MIN_F32), _CMP_LT_OQ), scaled);
}
INLINE __m256 f32v_bit(const uint32_t* words, int j) {
    const __m256i bit = _mm256_set1_epi32((int)(1u << j));
    return _mm256_castsi256_ps(
        _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_load_si256((const __m256i*)words), bit), bit));
}
INLINE void f32v_transpose(__m256 r[8]) {
    __m256 t[8];
    UNROLL(8)
    for (int i = 0; i < 4; i++) {
        t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    UNROLL(8)
    for (int i = 0; i < 8; i++) { /* rows 4g .. 4g + 3, column i % 4 of each half */
        const int g = i / 4, c = i % 4;
        const __m256d a = _mm256_castps_pd(t[4 * g + c / 2]), b = _mm256_castps_pd(t[4 * g + 2 + c / 2]);
        r[i] = _mm256_castpd_ps(c % 2 ? _mm256_unpackhi_pd(a, b) : _mm256_unpacklo_pd(a, b));
    }
    UNROLL(8)
    for (int c = 0; c < 4; c++) {
        t[c] = _mm256_permute2f128_ps(r[c], r[4 + c], 0x20);
        t[4 + c] = _mm256_permute2f128_ps(r[c], r[4 + c], 0x31);
    }
    UNROLL(8)
    for (int c = 0; c < 8; c++) r[c] = t[c];
}

INLINE __m256 f32v_load_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
INLINE __m256 f32v_bf16_first(__m256 x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x), 16)); }
INLINE __m256 f32v_bf16_second(__m256 x) {
    return _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(INT32_MIN >> 15)));
}
INLINE __m256 f32v_load_bf16(const uint16_t* p) {
    return f32v_bf16_first(_mm256_castsi256_ps(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p))));
}
INLINE void f32v_store_f16(uint16_t* p, __m256 x) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

#define READS_STORED
#define HAS_STORE_F16
#define REAL float
#define LARGEST FLT_MAX
#define LANES 8
#define V(name) f32v_##name
#define T(name) f32_##name
#define TILES_3 DRIVERS_OF(3, 4, UP_TO_4)
#define TILES_2 DRIVERS_OF(2, 6, UP_TO_6)
#define TILES_1 DRIVERS_OF(1, 12, UP_TO_12)
#define FEW_TILES FEW_OF(1, 8, 8) FEW_OF(2, 4, 4) FEW_OF(3, 4, 2) FEW_OF(4, 2, 2)
#define FEW_DIRECT 0
#define OUTER_VECTORS 2
#define PEAK_CHAINS 12
#define EXP2_LIST EXP2_F32
#include "tiles.inc"

/* ---- double ---- */
typedef __m256d f64v_vec;
typedef __m256d f64v_mask;
INLINE __m256i f64v_first(ptrdiff_t n) { return _mm256_loadu_si256((const __m256i*)(first_lanes_64 + 4 - n)); }
INLINE __m256d f64v_load(const double* p) { return _mm256_load_pd(p); }
INLINE __m256d f64v_loadu(const double* p) { return _mm256_loadu_pd(p); }
INLINE __m256d f64v_load_part(const double* p, ptrdiff_t n) { return _mm256_maskload_pd(p, f64v_first(n)); }
INLINE void f64v_store(double* p, __m256d x) { _mm256_store_pd(p, x); }
INLINE void f64v_storeu(double* p, __m256d x) { _mm256_storeu_pd(p, x); }
INLINE void f64v_store_part(double* p, __m256d x, ptrdiff_t n) { _mm256_maskstore_pd(p, f64v_first(n), x); }
INLINE __m256d f64v_set1(double x) { return _mm256_set1_pd(x); }
INLINE __m256d f64v_add(__m256d a, __m256d b) { return _mm256_add_pd(a, b); }
INLINE __m256d f64v_sub(__m256d a, __m256d b) { return _mm256_sub_pd(a, b); }
INLINE __m256d f64v_mul(__m256d a, __m256d b) { return _mm256_mul_pd(a, b); }
INLINE __m256d f64v_div(__m256d a, __m256d b) { return _mm256_div_pd(a, b); }
INLINE __m256d f64v_fma(__m256d a, __m256d b, __m256d c) { return _mm256_fmadd_pd(a, b, c); }
INLINE __m256d f64v_max(__m256d a, __m256d b) { return _mm256_max_pd(a, b); }
INLINE __m256d f64v_min(__m256d a, __m256d b) { return _mm256_min_pd(a, b); }
INLINE __m256d f64v_equal(__m256d a, __m256d b) { return _mm256_cmp_pd(a, b, _CMP_EQ_OQ); }
INLINE __m256d f64v_above(__m256d a, __m256d b) { return _mm256_cmp_pd(a, b, _CMP_GT_OQ); }
INLINE int f64v_any_above(__m256d a, double b) { return _mm256_movemask_pd(f64v_above(a, _mm256_set1_pd(b))); }
INLINE __m256d f64v_infinite(__m256d a) {
    return _mm256_cmp_pd(_mm256_andnot_pd(_mm256_set1_pd(-0.0), a), _mm256_set1_pd(INFINITY), _CMP_EQ_OQ);
}
INLINE __m256d f64v_minus_zero(__m256d a) {
    return _mm256_castsi256_pd(_mm256_cmpeq_epi64(_mm256_castpd_si256(a), _mm256_set1_epi64x(INT64_MIN)));
}
INLINE __m256d f64v_select(__m256d k, __m256d a, __m256d b) { return _mm256_blendv_pd(b, a, k); }
INLINE __m256d f64v_abs(__m256d a) { return _mm256_andnot_pd(_mm256_set1_pd(-0.0), a); }
INLINE __m256d f64v_copy_sign(__m256d a, __m256d b) {
    return _mm256_or_pd(f64v_abs(a), _mm256_and_pd(_mm256_set1_pd(-0.0), b));
}
INLINE __m256d f64v_round(__m256d x) { return _mm256_round_pd(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE __m256d f64v_scale_from(__m256d p, __m256d n, __m256d x) {
    const __m256i shift = _mm256_slli_epi64(_mm256_cvtepi32_epi64(_mm256_cvtpd_epi32(n)), 52);
    const __m256d scaled = _mm256_castsi256_pd(_mm256_add_epi64(_mm256_castpd_si256(p), shift));
    return _mm256_andnot_pd(_mm256_cmp_pd(x, _mm256_set1_pd(EXP2_MIN_F64), _CMP_LT_OQ), scaled);
}
INLINE __m256d f64v_bit(const uint32_t* words, int j) {
    const __m128i bit = _mm_set1_epi32((int)(1u << j));
    const __m128i set = _mm_cmpeq_epi32(_mm_and_si128(_mm_load_si128((const __m128i*)words), bit), bit);
    return _mm256_castsi256_pd(_mm256_cvtepi32_epi64(set));
}
INLINE void f64v_transpose(__m256d r[4]) {
    const __m256d a = _mm256_unpacklo_pd(r[0], r[1]), b = _mm256_unpackhi_pd(r[0], r[1]);
    const __m256d c = _mm256_unpacklo_pd(r[2], r[3]), d = _mm256_unpackhi_pd(r[2], r[3]);
    r[0] = _mm256_permute2f128_pd(a, c, 0x20);
    r[1] = _mm256_permute2f128_pd(b, d, 0x20);
    r[2] = _mm256_permute2f128_pd(a, c, 0x31);
    r[3] = _mm256_permute2f128_pd(b, d, 0x31);
}

#define REAL double
#define LARGEST DBL_MAX
#define LANES 4
#define V(name) f64v_##name
#define T(name) f64_##name
#define TILES_3 DRIVERS_OF(3, 4, UP_TO_4)
#define TILES_2 DRIVERS_OF(2, 6, UP_TO_6)
#define TILES_1 DRIVERS_OF(1, 12, UP_TO_12)
#define FEW_TILES FEW_OF(1, 8, 8) FEW_OF(2, 4, 4) FEW_OF(3, 4, 2) FEW_OF(4, 2, 2)
#define FEW_DIRECT 0
#define OUTER_VECTORS 2
#define PEAK_CHAINS 12
#define EXP2_LIST EXP2_F64
#include "tiles.inc"

/* ---- angles: what they need beyond the double vocabulary ---- */
INLINE __m256d f64v_product_error(__m256d a, __m256d b, __m256d ab) { return _mm256_fmsub_pd(a, b, ab); }
INLINE __m256d f64v_swap_pairs(__m256d x) { return _mm256_permute_pd(x, 0x5); }
/* p[2 i] = a[i], p[2 i + 1] = b[i]. */
INLINE void f64v_store_pairs(double* p, __m256d a, __m256d b) {
    const __m256d even = _mm256_unpacklo_pd(a, b), odd = _mm256_unpackhi_pd(a, b);
    _mm256_store_pd(p, _mm256_permute2f128_pd(even, odd, 0x20));
    _mm256_store_pd(p + 4, _mm256_permute2f128_pd(even, odd, 0x31));
}
INLINE __m256d f64v_load_f32(const float* p) { return _mm256_cvtps_pd(_mm_loadu_ps(p)); }
INLINE __m256d f64v_load_f32_part(const float* p, ptrdiff_t n) {
    return _mm256_cvtps_pd(_mm_maskload_ps(p, _mm_loadu_si128((const __m128i*)(first_lanes_32 + 8 - n))));
}
INLINE void f64v_store_f32(float* p, __m256d x) { _mm_storeu_ps(p, _mm256_cvtpd_ps(x)); }
INLINE void f64v_store_f32_part(float* p, __m256d x, ptrdiff_t n) {
    const __m128i first = _mm_loadu_si128((const __m128i*)(first_lanes_32 + 8 - n));
    _mm_maskstore_ps(p, first, _mm256_cvtpd_ps(x));
}
/* Bit `bit` of a whole number below 2^51, in two's complement: adding 1.5 * 2^52 puts its units into the last place.
 * Only the sign of a lane is a mask here, which is all that select looks at. */
INLINE __m256d f64v_has_bit(__m256d n, int bit) {
    const __m256i units = _mm256_castpd_si256(_mm256_add_pd(n, _mm256_set1_pd(0x1.8p52)));
    return _mm256_castsi256_pd(_mm256_slli_epi64(units, 63 - bit));
}

INLINE __m256d f64v_sign_from(__m256d a, __m256d b) { return _mm256_or_pd(a, _mm256_and_pd(_mm256_set1_pd(-0.0), b)); }
INLINE __m256d f64v_power_of_two(__m256d x) {
    return _mm256_and_pd(x, _mm256_set1_pd(INFINITY)); /* the bits of the exponent */
}
#define LANES 4
#define V(name) f64v_##name
#include "rounded16.inc"

INLINE __m256d f64v_load_f16(const uint16_t* p) {
    return _mm256_cvtps_pd(_mm_cvtph_ps(_mm_loadl_epi64((const __m128i*)p)));
}
INLINE void f64v_store_f16(uint16_t* p, __m256d x) { /* rounded to odd in between: at_odd in halves.h */
    const __m256i lost = _mm256_set1_epi64x(0x1fffffff), bits = _mm256_castpd_si256(x);
    const __m256i any = _mm256_or_si256(_mm256_add_epi64(_mm256_and_si256(bits, lost), lost), bits);
    const __m128 odd = _mm256_cvtpd_ps(_mm256_castsi256_pd(_mm256_andnot_si256(lost, any)));
    _mm_storel_epi64((__m128i*)p, _mm_cvtps_ph(odd, _MM_FROUND_TO_NEAREST_INT));
}
INLINE __m256d f64v_load_bf16(const uint16_t* p) { /* each number behind 16 bits of 0 */
    const __m128i wide = _mm_unpacklo_epi16(_mm_setzero_si128(), _mm_loadl_epi64((const __m128i*)p));
    return _mm256_cvtps_pd(_mm_castsi128_ps(wide));
}
INLINE void f64v_store_bf16(uint16_t* p, __m256d x) {
    const __m128i upper = _mm_set_epi8(-1, -1, -1, -1, -1, -1, -1, -1, 15, 14, 11, 10, 7, 6, 3, 2);
    _mm_storel_epi64((__m128i*)p, _mm_shuffle_epi8(_mm_castps_si128(_mm256_cvtpd_ps(f64v_rounded_bf16(x))), upper));
}

#include "angles.inc"

const at_isa at_avx2 = {"avx2", &f32_tiles, &f64_tiles, &angles_table};
#endif
