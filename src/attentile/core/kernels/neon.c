/* AArch64 Advanced SIMD (NEON) vocabulary: 4 floats or 2 doubles per vector, 32 registers, masks are vectors of all-ones
 * lanes. Part of every AArch64 processor, so no flag asks for it.
 * Empty for other processors: a universal build of macOS compiles every file for both of its own. */
#if defined(__aarch64__) || defined(_M_ARM64)
#include <arm_neon.h>

#include "common.h"

#define IN_REGISTER(x) __asm__("" : "+w"(x))

/* ---- float ---- */
typedef float32x4_t f32v_vec;
typedef uint32x4_t f32v_mask;
INLINE float32x4_t f32v_load(const float* p) { return vld1q_f32(p); }
INLINE float32x4_t f32v_loadu(const float* p) { return vld1q_f32(p); }
INLINE float32x4_t f32v_load_part(const float* p, ptrdiff_t n) {
    const float32x4_t zero = vdupq_n_f32(0);
    if (n >= 4) return vld1q_f32(p);
    if (n < 2) return n < 1 ? zero : vld1q_lane_f32(p, zero, 0);
    const float32x4_t two = vcombine_f32(vld1_f32(p), vdup_n_f32(0));
    return n == 2 ? two : vld1q_lane_f32(p + 2, two, 2);
}
INLINE void f32v_store(float* p, float32x4_t x) { vst1q_f32(p, x); }
INLINE void f32v_storeu(float* p, float32x4_t x) { vst1q_f32(p, x); }
INLINE void f32v_store_part(float* p, float32x4_t x, ptrdiff_t n) {
    if (n >= 4) {
        vst1q_f32(p, x);
        return;
    }
    if (n >= 2) vst1_f32(p, vget_low_f32(x));
    if (n == 1) vst1q_lane_f32(p, x, 0);
    if (n == 3) vst1q_lane_f32(p + 2, x, 2);
}
INLINE float32x4_t f32v_set1(float x) { return vdupq_n_f32(x); }
INLINE float32x4_t f32v_add(float32x4_t a, float32x4_t b) { return vaddq_f32(a, b); }
INLINE float32x4_t f32v_sub(float32x4_t a, float32x4_t b) { return vsubq_f32(a, b); }
INLINE float32x4_t f32v_mul(float32x4_t a, float32x4_t b) { return vmulq_f32(a, b); }
INLINE float32x4_t f32v_div(float32x4_t a, float32x4_t b) { return vdivq_f32(a, b); }
INLINE float32x4_t f32v_fma(float32x4_t a, float32x4_t b, float32x4_t c) { return vfmaq_f32(c, a, b); }
/* An element from memory, without a broadcast: that would take the pipes of the FMAs. */
#define BY_ELEMENT
typedef float32x2_t f32v_one;
INLINE float32x2_t f32v_load_one(const float* p) {
    uint32_t bits;
    memcpy(&bits, p, sizeof bits);
    return vcreate_f32(bits);
}
INLINE float32x4_t f32v_fma_one(float32x2_t b, float32x4_t x, float32x4_t c) { return vfmaq_lane_f32(c, x, b, 0); }
INLINE uint32x4_t f32v_equal(float32x4_t a, float32x4_t b) { return vceqq_f32(a, b); }
INLINE uint32x4_t f32v_above(float32x4_t a, float32x4_t b) { return vcgtq_f32(a, b); }
INLINE float32x4_t f32v_select(uint32x4_t k, float32x4_t a, float32x4_t b) { return vbslq_f32(k, a, b); }
/* By comparison: FMAX returns NaN for NaN in either operand, FMAXNM for none but two, and both order the zeros. Here the
 * second operand is the answer whenever the first one is not above (below) it, as on x86. */
INLINE float32x4_t f32v_max(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
INLINE float32x4_t f32v_min(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
INLINE int f32v_any_above(float32x4_t a, float b) { return vmaxvq_u32(vcgtq_f32(a, vdupq_n_f32(b))) != 0; }
INLINE uint32x4_t f32v_infinite(float32x4_t a) { return vceqq_f32(vabsq_f32(a), vdupq_n_f32(INFINITY)); }
INLINE uint32x4_t f32v_minus_zero(float32x4_t a) {
    return vceqq_u32(vreinterpretq_u32_f32(a), vdupq_n_u32(UINT32_C(1) << 31));
}
INLINE float32x4_t f32v_abs(float32x4_t a) { return vabsq_f32(a); }
INLINE float32x4_t f32v_copy_sign(float32x4_t a, float32x4_t b) { /* the sign bit of b, the rest of a */
    return vbslq_f32(vdupq_n_u32(UINT32_C(1) << 31), b, a);
}
INLINE float32x4_t f32v_round(float32x4_t x) { return vrndnq_f32(x); }
/* p * 2^n, 0 where x is below the power of the smallest weight. NaN converts to 0, so it stays NaN in p and passes. */
INLINE float32x4_t f32v_scale_from(float32x4_t p, float32x4_t n, float32x4_t x) {
    const int32x4_t shift = vshlq_n_s32(vcvtnq_s32_f32(n), 23);
    const int32x4_t scaled = vaddq_s32(vreinterpretq_s32_f32(p), shift);
    const uint32x4_t tiny = vcltq_f32(x, vdupq_n_f32(EXP2_MIN_F32));
    return vreinterpretq_f32_s32(vbicq_s32(scaled, vreinterpretq_s32_u32(tiny)));
}
INLINE uint32x4_t f32v_bit(const uint32_t* words, int j) {
    return vtstq_u32(vld1q_u32(words), vdupq_n_u32(UINT32_C(1) << j));
}
INLINE float32x4_t f32v_pairs_even(float32x4_t a, float32x4_t b) { /* a0 a1 b0 b1 */
    return vreinterpretq_f32_f64(vtrn1q_f64(vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b)));
}
INLINE float32x4_t f32v_pairs_odd(float32x4_t a, float32x4_t b) { /* a2 a3 b2 b3 */
    return vreinterpretq_f32_f64(vtrn2q_f64(vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b)));
}
INLINE void f32v_transpose(float32x4_t r[4]) {
    const float32x4_t a = vtrn1q_f32(r[0], r[1]), b = vtrn2q_f32(r[0], r[1]);
    const float32x4_t c = vtrn1q_f32(r[2], r[3]), d = vtrn2q_f32(r[2], r[3]);
    r[0] = f32v_pairs_even(a, c);
    r[1] = f32v_pairs_even(b, d);
    r[2] = f32v_pairs_odd(a, c);
    r[3] = f32v_pairs_odd(b, d);
}

INLINE float32x4_t f32v_load_f16(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
INLINE float32x4_t f32v_load_bf16(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
INLINE float32x4_t f32v_bf16_first(float32x4_t x) {
    return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(x), 16));
}
INLINE float32x4_t f32v_bf16_second(float32x4_t x) {
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x), vdupq_n_u32(0xffff0000)));
}
INLINE void f32v_store_f16(uint16_t* p, float32x4_t x) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x))); }

#define READS_STORED
#define HAS_STORE_F16
#define REAL float
#define LARGEST FLT_MAX
#define LANES 4
#define V(name) f32v_##name
#define T(name) f32_##name
#define TILES_3 DRIVERS_OF(3, 6, UP_TO_6)
#define TILES_2 DRIVERS_OF(2, 10, UP_TO_10)
#define TILES_1 DRIVERS_OF(1, 12, UP_TO_12)
#define FEW_TILES FEW_OF(1, 8, 8) FEW_OF(2, 8, 8) FEW_OF(3, 6, 6) FEW_OF(4, 4, 4)
#define FEW_DIRECT 0
#define OUTER_VECTORS 4
#define PEAK_CHAINS 24
#define EXP2_LIST EXP2_F32
#include "tiles.inc"

/* ---- double ---- */
typedef float64x2_t f64v_vec;
typedef uint64x2_t f64v_mask;
INLINE float64x2_t f64v_load(const double* p) { return vld1q_f64(p); }
INLINE float64x2_t f64v_loadu(const double* p) { return vld1q_f64(p); }
INLINE float64x2_t f64v_load_part(const double* p, ptrdiff_t n) {
    if (n >= 2) return vld1q_f64(p);
    return n < 1 ? vdupq_n_f64(0) : vcombine_f64(vld1_f64(p), vdup_n_f64(0));
}
INLINE void f64v_store(double* p, float64x2_t x) { vst1q_f64(p, x); }
INLINE void f64v_storeu(double* p, float64x2_t x) { vst1q_f64(p, x); }
INLINE void f64v_store_part(double* p, float64x2_t x, ptrdiff_t n) {
    if (n >= 2)
        vst1q_f64(p, x);
    else if (n == 1)
        vst1_f64(p, vget_low_f64(x));
}
INLINE float64x2_t f64v_set1(double x) { return vdupq_n_f64(x); }
INLINE float64x2_t f64v_add(float64x2_t a, float64x2_t b) { return vaddq_f64(a, b); }
INLINE float64x2_t f64v_sub(float64x2_t a, float64x2_t b) { return vsubq_f64(a, b); }
INLINE float64x2_t f64v_mul(float64x2_t a, float64x2_t b) { return vmulq_f64(a, b); }
INLINE float64x2_t f64v_div(float64x2_t a, float64x2_t b) { return vdivq_f64(a, b); }
INLINE float64x2_t f64v_fma(float64x2_t a, float64x2_t b, float64x2_t c) { return vfmaq_f64(c, a, b); }
#define BY_ELEMENT
typedef float64x1_t f64v_one;
INLINE float64x1_t f64v_load_one(const double* p) { return vld1_f64(p); }
INLINE float64x2_t f64v_fma_one(float64x1_t b, float64x2_t x, float64x2_t c) { return vfmaq_lane_f64(c, x, b, 0); }
INLINE uint64x2_t f64v_equal(float64x2_t a, float64x2_t b) { return vceqq_f64(a, b); }
INLINE uint64x2_t f64v_above(float64x2_t a, float64x2_t b) { return vcgtq_f64(a, b); }
INLINE float64x2_t f64v_select(uint64x2_t k, float64x2_t a, float64x2_t b) { return vbslq_f64(k, a, b); }
INLINE float64x2_t f64v_max(float64x2_t a, float64x2_t b) { return vbslq_f64(vcgtq_f64(a, b), a, b); }
INLINE float64x2_t f64v_min(float64x2_t a, float64x2_t b) { return vbslq_f64(vcltq_f64(a, b), a, b); }
INLINE int f64v_any_above(float64x2_t a, double b) {
    return vmaxvq_u32(vreinterpretq_u32_u64(vcgtq_f64(a, vdupq_n_f64(b)))) != 0;
}
INLINE uint64x2_t f64v_infinite(float64x2_t a) { return vceqq_f64(vabsq_f64(a), vdupq_n_f64(INFINITY)); }
INLINE uint64x2_t f64v_minus_zero(float64x2_t a) {
    return vceqq_u64(vreinterpretq_u64_f64(a), vdupq_n_u64(UINT64_C(1) << 63));
}
INLINE float64x2_t f64v_abs(float64x2_t a) { return vabsq_f64(a); }
INLINE float64x2_t f64v_copy_sign(float64x2_t a, float64x2_t b) {
    return vbslq_f64(vdupq_n_u64(UINT64_C(1) << 63), b, a);
}
INLINE float64x2_t f64v_round(float64x2_t x) { return vrndnq_f64(x); }
INLINE float64x2_t f64v_scale_from(float64x2_t p, float64x2_t n, float64x2_t x) {
    const int64x2_t shift = vshlq_n_s64(vcvtnq_s64_f64(n), 52);
    const int64x2_t scaled = vaddq_s64(vreinterpretq_s64_f64(p), shift);
    const uint64x2_t tiny = vcltq_f64(x, vdupq_n_f64(EXP2_MIN_F64));
    return vreinterpretq_f64_s64(vbicq_s64(scaled, vreinterpretq_s64_u64(tiny)));
}
INLINE uint64x2_t f64v_bit(const uint32_t* words, int j) { /* the mask of a word is widened with its sign */
    const uint32x2_t set = vtst_u32(vld1_u32(words), vdup_n_u32(UINT32_C(1) << j));
    return vreinterpretq_u64_s64(vmovl_s32(vreinterpret_s32_u32(set)));
}
INLINE void f64v_transpose(float64x2_t r[2]) {
    const float64x2_t a = vtrn1q_f64(r[0], r[1]), b = vtrn2q_f64(r[0], r[1]);
    r[0] = a;
    r[1] = b;
}

#define REAL double
#define LARGEST DBL_MAX
#define LANES 2
#define V(name) f64v_##name
#define T(name) f64_##name
#define TILES_3 DRIVERS_OF(3, 6, UP_TO_6)
#define TILES_2 DRIVERS_OF(2, 10, UP_TO_10)
#define TILES_1 DRIVERS_OF(1, 12, UP_TO_12)
#define FEW_TILES FEW_OF(1, 8, 8) FEW_OF(2, 8, 8) FEW_OF(3, 6, 6) FEW_OF(4, 4, 4)
#define FEW_DIRECT 0
#define OUTER_VECTORS 4
#define PEAK_CHAINS 24
#define EXP2_LIST EXP2_F64
#include "tiles.inc"

/* ---- angles: what they need beyond the double vocabulary ---- */
INLINE float64x2_t f64v_product_error(float64x2_t a, float64x2_t b, float64x2_t ab) {
    return vfmaq_f64(vnegq_f64(ab), a, b);
}
INLINE float64x2_t f64v_swap_pairs(float64x2_t x) { return vextq_f64(x, x, 1); }
/* p[2 i] = a[i], p[2 i + 1] = b[i]. */
INLINE void f64v_store_pairs(double* p, float64x2_t a, float64x2_t b) {
    vst1q_f64(p, vzip1q_f64(a, b));
    vst1q_f64(p + 2, vzip2q_f64(a, b));
}
INLINE float64x2_t f64v_load_f32(const float* p) { return vcvt_f64_f32(vld1_f32(p)); }
INLINE float64x2_t f64v_load_f32_part(const float* p, ptrdiff_t n) {
    const float32x2_t zero = vdup_n_f32(0);
    return vcvt_f64_f32(n >= 2 ? vld1_f32(p) : n < 1 ? zero : vld1_lane_f32(p, zero, 0));
}
INLINE void f64v_store_f32(float* p, float64x2_t x) { vst1_f32(p, vcvt_f32_f64(x)); }
INLINE void f64v_store_f32_part(float* p, float64x2_t x, ptrdiff_t n) {
    if (n >= 2)
        vst1_f32(p, vcvt_f32_f64(x));
    else if (n == 1)
        vst1_lane_f32(p, vcvt_f32_f64(x), 0);
}
/* Bit `bit` of a whole number below 2^51, in two's complement: adding 1.5 * 2^52 puts its units into the last place. */
INLINE uint64x2_t f64v_has_bit(float64x2_t n, int bit) {
    const uint64x2_t units = vreinterpretq_u64_f64(vaddq_f64(n, vdupq_n_f64(0x1.8p52)));
    return vtstq_u64(units, vdupq_n_u64(UINT64_C(1) << bit));
}

INLINE float64x2_t f64v_sign_from(float64x2_t a, float64x2_t b) { return f64v_copy_sign(a, b); }
INLINE float64x2_t f64v_power_of_two(float64x2_t x) { /* the bits of the exponent */
    const uint64x2_t exponent = vreinterpretq_u64_f64(vdupq_n_f64(INFINITY));
    return vreinterpretq_f64_u64(vandq_u64(vreinterpretq_u64_f64(x), exponent));
}
#define LANES 2
#define V(name) f64v_##name
#include "rounded16.inc"

INLINE uint16x4_t f64v_load_16(const uint16_t* p) { /* in the lower half */
    uint32_t two;
    memcpy(&two, p, sizeof two);
    return vcreate_u16(two);
}
INLINE void f64v_store_16(uint16_t* p, uint16x4_t x) {
    const uint32_t two = vget_lane_u32(vreinterpret_u32_u16(x), 0);
    memcpy(p, &two, sizeof two);
}
INLINE float64x2_t f64v_load_f16(const uint16_t* p) {
    return vcvt_f64_f32(vget_low_f32(vcvt_f32_f16(vreinterpret_f16_u16(f64v_load_16(p)))));
}
INLINE void f64v_store_f16(uint16_t* p, float64x2_t x) {
    const float32x2_t odd = vcvtx_f32_f64(x); /* what at_odd in halves.h does */
    f64v_store_16(p, vreinterpret_u16_f16(vcvt_f16_f32(vcombine_f32(odd, odd))));
}
INLINE float64x2_t f64v_load_bf16(const uint16_t* p) {
    const float32x4_t wide = vreinterpretq_f32_u32(vshll_n_u16(f64v_load_16(p), 16));
    return vcvt_f64_f32(vget_low_f32(wide));
}
INLINE void f64v_store_bf16(uint16_t* p, float64x2_t x) {
    const uint32x2_t bits = vreinterpret_u32_f32(vcvt_f32_f64(f64v_rounded_bf16(x)));
    f64v_store_16(p, vshrn_n_u32(vcombine_u32(bits, bits), 16));
}

#include "angles.inc"

const at_isa at_neon = {"neon", &f32_tiles, &f64_tiles, &angles_table};
#endif
