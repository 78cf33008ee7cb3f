/* Arrays of float16 and bfloat16 to float and back; in loops of which the compiler makes vectors. */
#include "halves.h"

#include "kernels.h"

void at_widen_f16(float* to, const uint16_t* from, ptrdiff_t n) {
    for (ptrdiff_t i = 0; i < n; i++) to[i] = at_float_of_f16(from[i]);
}

void at_narrow_f16(uint16_t* to, const float* from, ptrdiff_t n) {
    for (ptrdiff_t i = 0; i < n; i++) to[i] = at_f16_of(from[i]);
}

void at_widen_bf16(float* to, const uint16_t* from, ptrdiff_t n) {
    for (ptrdiff_t i = 0; i < n; i++) to[i] = at_float_of_bf16(from[i]);
}

void at_narrow_bf16(uint16_t* to, const float* from, ptrdiff_t n) {
    for (ptrdiff_t i = 0; i < n; i++) to[i] = at_bf16_of(from[i]);
}
