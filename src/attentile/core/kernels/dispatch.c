/* Which ISAs this build has, best first, and which of them this processor and operating system can run. _core.pyx takes the
 * first of these when it is imported; runtime/backend.py replaces it by one that the user asks for. */
#include "kernels.h"

#if defined(__x86_64__) || defined(_M_X64)
#include "cpu.h"
extern const at_isa at_avx512, at_avx2;
static int has_avx512(void) { return at_cpu_has(1); }
static int has_avx2(void) { return at_cpu_has(0); }
#elif defined(__aarch64__) || defined(_M_ARM64)
extern const at_isa at_neon;
#endif

extern const at_isa at_generic;
static int always(void) { return 1; }

static const struct {
    const at_isa* isa;
    int (*supported)(void);
} isas[] = {
#if defined(__x86_64__) || defined(_M_X64)
    {&at_avx512, has_avx512},
    {&at_avx2, has_avx2},
#elif defined(__aarch64__) || defined(_M_ARM64)
    {&at_neon, always}, /* part of the architecture, and of what every operating system for it saves */
#endif
    {&at_generic, always},
};

int at_isa_count(void) { return (int)(sizeof isas / sizeof *isas); }

const at_isa* at_isa_at(int index) { return isas[index].isa; }

int at_isa_supported(int index) { return isas[index].supported(); }
