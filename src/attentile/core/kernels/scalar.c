/* log2 and exp2 of one number, for the end of a row (logsumexp and sink). Those of the C libraries differ in the last
 * bit from one to the next, and glibc's with the processor too; these are additions, products and quotients in one
 * written order, so a row has the same bits everywhere. No FMA: where there is none, it would be a slow function. */
#include "common.h"

/* a + b = the result + *error, exact. */
static double exact_sum(double a, double b, double* error) {
    const double sum = a + b, of_b = sum - a;
    *error = (a - (sum - of_b)) + (b - of_b);
    return sum;
}

/* The upper 26 bits of x, whose products are exact; |x| < 2^996. */
static double upper_half(double x) {
    const double wide = x * 0x1.0000002p27;
    return wide - (wide - x);
}

/* a * b = the result + *error, exact unless it underflows. */
static double exact_product(double a, double b, double* error) {
    const double product = a * b;
    const double a1 = upper_half(a), a2 = a - a1;
    const double b1 = upper_half(b), b2 = b - b1;
    *error = a2 * b2 - (((product - a1 * b1) - a2 * b1) - a1 * b2);
    return product;
}

/* With x = 2^k z, 1 / sqrt 2 <= z < sqrt 2, and s = (z - 1) / (z + 1): log2 x = k + 2 / ln 2 (s + s^3 / 3 + s^5 / 5 ...).
 * The first term carries its rounding errors along; the eleventh power of s^2 <= 0.0295 is below them. */
double at_log2(double x) {
    static const double two_over_ln2_high = 0x1.71547652b82fep+1, two_over_ln2_low = 0x1.777d0ffda0d24p-55;
    if (!(x > 0)) return x == 0 ? -(double)INFINITY : (double)NAN;
    if (x > DBL_MAX) return x;
    int k;
    double z = frexp(x, &k), sum_error, product_error, low, rest;
    if (z < 0x1.6a09e667f3bcdp-1) {
        z *= 2;
        k--;
    }
    const double above = z - 1, sum = exact_sum(z, 1, &sum_error);
    const double s = above / sum;
    const double product = exact_product(s, sum, &product_error);
    const double s_low = (((above - product) - product_error) - s * sum_error) / sum;
    const double square = s * s;
    double series = 1.0 / 21;
    for (int n = 19; n >= 3; n -= 2) series = series * square + 1.0 / n;
    const double tail = s_low + s * square * series;
    const double high = exact_product(s, two_over_ln2_high, &low);
    low += s * two_over_ln2_low + tail * two_over_ln2_high;
    const double result = exact_sum((double)k, high, &rest);
    return result + (rest + low);
}

double at_exp2(double x) {
    static const double c[] = {EXP2_F64};
    if (x != x) return x;
    if (x >= 1024) return (double)INFINITY;
    if (x < EXP2_MIN_F64) return 0;
    const double n = (x + 0x1.8p52) - 0x1.8p52, f = x - n;
    double p = c[0];
    for (size_t t = 1; t < sizeof c / sizeof *c; t++) p = p * f + c[t];
    return ldexp(p, (int)n);
}
