/* What this x86-64 processor can run, asked from the processor itself: the compiler's own check needs a run-time library
 * that the linker of Windows does not bring. */
#ifndef AT_CPU_H
#define AT_CPU_H

#include <cpuid.h>

#define AT_BIT(word, bit) ((word) >> (bit) & 1u)

/* Bits of the register file that the operating system saves when it switches threads (XCR0). */
static unsigned at_saved_registers(void) {
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

/* Vectors of 256 bits with FMA and conversions of float16, or those of 512 bits too: the instructions, and registers that survive a switch. */
static int at_cpu_has(int wide) {
    const unsigned saved = wide ? 0xe6 : 0x06; /* XMM, YMM; masks and both halves of ZMM */
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
    if (!AT_BIT(c, 12) || !AT_BIT(c, 27) || !AT_BIT(c, 28) || !AT_BIT(c, 29)) return 0; /* FMA, XGETBV, AVX, F16C */
    if ((at_saved_registers() & saved) != saved) return 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    if (!wide) return (int)AT_BIT(b, 5);                                             /* AVX2 */
    return AT_BIT(b, 16) && AT_BIT(b, 17) && AT_BIT(b, 30) && AT_BIT(b, 31) ? 1 : 0; /* AVX-512 F, DQ, BW, VL */
}

#endif
