/* The thread pool and the look at the processor on their own, without Python: what can be run on a platform for which
 * there is no Python at hand (Windows code under Wine). Prints "ok", or what is wrong.
 *
 *     cc -std=c11 -O2 -I src/attentile/core/kernels tests/c/check_platform.c \
 *         src/attentile/core/kernels/pool.c -lpthread */
#include "threads.h"

#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "kernels.h"

#if defined(__x86_64__) || defined(_M_X64)
#include "cpu.h"
#define X86 1
#else
#define X86 0
#endif

#define CALLERS 6
#define REGIONS 400
#define TASKS 64

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            printf("line %d: %s\n", __LINE__, #condition);                                                             \
            return 1;                                                                                                  \
        }                                                                                                              \
    } while (0)

typedef struct {
    _Atomic int runs[TASKS];
    _Atomic int running[8]; /* of each slot: two threads in one slot would share its scratch */
    _Atomic int wrong;
    int work;
} job;

static _Atomic int helped; /* tasks that a worker ran */

static void task(void* pointer, ptrdiff_t index, int slot) {
    job* mine = pointer;
    if (slot > 0) atomic_fetch_add(&helped, 1);
    if (atomic_fetch_add(&mine->running[slot], 1)) atomic_store(&mine->wrong, 1);
    for (volatile int i = 0; i < mine->work; i++) {
    }
    atomic_fetch_add(&mine->runs[index], 1);
    atomic_fetch_sub(&mine->running[slot], 1);
}

/* Each task once, whatever the number of threads. */
static int regions(int rounds, int threads, int work) {
    static _Atomic int zero[8];
    for (int round = 0; round < rounds; round++) {
        job mine;
        const int tasks = 1 + round % TASKS;
        memset(&mine, 0, sizeof mine);
        mine.work = work;
        at_pool_run(task, &mine, tasks, threads);
        for (int i = 0; i < TASKS; i++) CHECK(mine.runs[i] == (i < tasks));
        CHECK(!mine.wrong && memcmp(mine.running, zero, sizeof zero) == 0);
    }
    return 0;
}

static int scratch(void) {
    char* kept = NULL;
    for (size_t bytes = 1; bytes < 3000000; bytes = bytes * 3 + 1) {
        kept = at_scratch(bytes);
        CHECK(kept && (uintptr_t)kept % AT_ALIGN == 0);
        memset(kept, 1, bytes);
    }
    CHECK(at_scratch(1) == kept);
    CHECK(at_scratch(SIZE_MAX - 100) == NULL); /* more than there can be */
    CHECK(at_scratch(SIZE_MAX / 4) == NULL);   /* more than there is */
    CHECK(at_scratch(64));                     /* and that is not the end */
    return 0;
}

static _Atomic int failures, callers;
static _Atomic(void*) scratch_of[CALLERS];

static at_thread_result AT_THREAD_CALL call(void* number) {
    const int mine = (int)(intptr_t)number;
    if (regions(REGIONS, 4, 20 * mine) || scratch()) atomic_fetch_add(&failures, 1);
    atomic_store(&scratch_of[mine], at_scratch(64));
    atomic_fetch_add(&callers, 1);
    while (atomic_load(&callers) < CALLERS) AT_RELAX(); /* all alive, so that no block is given twice */
    atomic_fetch_add(&callers, CALLERS);
    return 0;
}

int main(void) {
    if (regions(REGIONS, 1, 10)) return 1;
    CHECK(at_pool_workers() == 0);
    if (regions(REGIONS, 3, 10) || scratch()) return 1;
    CHECK(at_pool_workers() == 2);
    atomic_store(&helped, 0);
    for (int round = 0; round < 50 && helped < 100;
         round++) /* long enough that everybody works, and sleeps in between */
        if (regions(20, 4, 200000)) return 1;
    CHECK(helped >= 100);
    for (intptr_t i = 0; i < CALLERS; i++) CHECK(at_thread_start(call, (void*)i) == 0);
    while (atomic_load(&callers) < CALLERS * (CALLERS + 1)) AT_RELAX();
    CHECK(failures == 0);
    for (int i = 0; i < CALLERS; i++)
        for (int j = 0; j < i; j++) CHECK(scratch_of[i] != scratch_of[j]);
#if X86 && defined(__GNUC__) && !defined(_MSC_VER)
    CHECK(at_cpu_has(0) == (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")));
    CHECK(at_cpu_has(1) == (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                            __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")));
#endif
    puts("ok");
    return 0;
}
