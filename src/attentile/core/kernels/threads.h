/* Threads, locks and thread-local memory for pool.c, and nothing that it does not use: once on POSIX, once on Win32.
 * Include it first: it asks the POSIX headers for what C11 alone hides.
 *
 *     at_lock, at_wake      a mutex, and a condition on which its holder can sleep; neither is ever destroyed
 *     at_thread_start       a detached thread that takes no signals but those of its own faults; 0 = started
 *     at_thread_yield       lets another thread have this processor
 *     at_thread_spread      the calling thread may also run where the first thread of the process may
 *     at_after_fork         what to do in a forked child, where only the forking thread is left
 *     at_once               runs a function exactly once in a process
 *     at_local              a pointer of each thread, released when the thread ends
 *     at_aligned            memory aligned to AT_ALIGN, for at_release; NULL: none
 *     at_nanoseconds        of a clock that only runs forward
 *     AT_RELAX              a word to the processor inside a spin loop
 *
 * And one thing of the processor: at_arithmetic, how it rounds and whether it keeps subnormal numbers, a setting of each
 * thread. */
#ifndef AT_THREADS_H
#define AT_THREADS_H

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#ifndef _WIN32_WINNT
#define _WIN32_WINNT 0x0601 /* SRW locks that can be tried: Windows 7 */
#endif
#include <malloc.h>
#include <windows.h>

#include "kernels.h"

#define AT_RELAX() YieldProcessor()

typedef SRWLOCK at_lock;
#define AT_LOCK_INIT SRWLOCK_INIT
static inline void at_lock_take(at_lock* lock) { AcquireSRWLockExclusive(lock); }
static inline int at_lock_try(at_lock* lock) { return TryAcquireSRWLockExclusive(lock) != 0; }
static inline void at_lock_drop(at_lock* lock) { ReleaseSRWLockExclusive(lock); }
static inline void at_lock_reset(at_lock* lock) { InitializeSRWLock(lock); }

typedef CONDITION_VARIABLE at_wake;
#define AT_WAKE_INIT CONDITION_VARIABLE_INIT
static inline void at_wake_wait(at_wake* wake, at_lock* held) { SleepConditionVariableSRW(wake, held, INFINITE, 0); }
static inline void at_wake_one(at_wake* wake) { WakeConditionVariable(wake); }
static inline void at_wake_reset(at_wake* wake) { InitializeConditionVariable(wake); }

typedef DWORD at_thread_result;
#define AT_THREAD_CALL WINAPI
static inline int at_thread_start(at_thread_result(AT_THREAD_CALL* run)(void*), void* argument) {
    const HANDLE thread = CreateThread(NULL, 0, run, argument, 0, NULL);
    if (!thread) return -1;
    CloseHandle(thread); /* detaches: the thread goes on */
    return 0;
}
static inline void at_thread_yield(void) { SwitchToThread(); }
static inline void at_thread_spread(void) {}
static inline void at_after_fork(void (*in_child)(void)) { (void)in_child; } /* Windows has no fork */

static inline uint64_t at_nanoseconds(void) {
    LARGE_INTEGER now, per_second;
    QueryPerformanceCounter(&now);
    QueryPerformanceFrequency(&per_second);
    return (uint64_t)((double)now.QuadPart * 1e9 / (double)per_second.QuadPart);
}

typedef INIT_ONCE at_once_flag;
#define AT_ONCE_INIT INIT_ONCE_STATIC_INIT
static inline BOOL CALLBACK at_once_call(PINIT_ONCE flag, PVOID function, PVOID* context) {
    (void)flag, (void)context;
    (*(void (**)(void))function)();
    return TRUE;
}
static inline void at_once(at_once_flag* flag, void (*function)(void)) {
    InitOnceExecuteOnce(flag, at_once_call, &function, NULL);
}

static inline void* at_aligned(size_t bytes) { return _aligned_malloc(bytes, AT_ALIGN); }
static inline void at_release(void* block) { _aligned_free(block); }

/* Fiber-local rather than thread-local storage, because only that calls back when a thread ends. */
typedef DWORD at_local;
static inline void CALLBACK at_local_end(void* block) { _aligned_free(block); }
static inline int at_local_open(at_local* local) {
    *local = FlsAlloc(at_local_end);
    return *local == FLS_OUT_OF_INDEXES ? -1 : 0;
}
static inline void* at_local_get(at_local local) { return FlsGetValue(local); }
static inline int at_local_set(at_local local, void* block) { return FlsSetValue(local, block) ? 0 : -1; }

#else /* POSIX */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>
#ifdef __linux__
#include <unistd.h>
#endif

#include "kernels.h"

#if defined(__x86_64__) || defined(__i386__)
#define AT_RELAX() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define AT_RELAX() __asm__ volatile("isb") /* some 10 ns; `yield` is no more than a nop on most of these processors */
#else
#define AT_RELAX() (void)0
#endif

typedef pthread_mutex_t at_lock;
#define AT_LOCK_INIT PTHREAD_MUTEX_INITIALIZER
static inline void at_lock_take(at_lock* lock) { pthread_mutex_lock(lock); }
static inline int at_lock_try(at_lock* lock) { return pthread_mutex_trylock(lock) == 0; }
static inline void at_lock_drop(at_lock* lock) { pthread_mutex_unlock(lock); }
static inline void at_lock_reset(at_lock* lock) { pthread_mutex_init(lock, NULL); }

typedef pthread_cond_t at_wake;
#define AT_WAKE_INIT PTHREAD_COND_INITIALIZER
static inline void at_wake_wait(at_wake* wake, at_lock* held) { pthread_cond_wait(wake, held); }
static inline void at_wake_one(at_wake* wake) { pthread_cond_signal(wake); }
static inline void at_wake_reset(at_wake* wake) { pthread_cond_init(wake, NULL); }

typedef void* at_thread_result;
#define AT_THREAD_CALL
static inline int at_thread_start(at_thread_result (*run)(void*), void* argument) {
    sigset_t all, before;
    pthread_attr_t detached;
    pthread_t thread;
    /* A fault that is blocked kills the process before its handler, faulthandler's too, can say where. */
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT};
    sigfillset(&all);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) sigdelset(&all, faults[i]);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    const int failed = pthread_create(&thread, &detached, run, argument);
    pthread_attr_destroy(&detached);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return failed ? -1 : 0;
}
/* A thread inherits the processors of the one that starts it, which may have been put on a single one, as may the first
 * thread. More processors than a set holds: an error, and all stays as it is. */
static inline void at_thread_spread(void) {
#ifdef __linux__
    cpu_set_t own, first;
    if (sched_getaffinity(0, sizeof own, &own) || sched_getaffinity(getpid(), sizeof first, &first)) return;
    CPU_OR(&own, &own, &first);
    sched_setaffinity(0, sizeof own, &own);
#endif
}
static inline void at_thread_yield(void) { sched_yield(); }
static inline void at_after_fork(void (*in_child)(void)) { pthread_atfork(NULL, NULL, in_child); }

static inline uint64_t at_nanoseconds(void) {
    struct timespec now;
#ifdef __APPLE__ /* whose CLOCK_MONOTONIC counts microseconds */
    clock_gettime(CLOCK_UPTIME_RAW, &now);
#else
    clock_gettime(CLOCK_MONOTONIC, &now);
#endif
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

typedef pthread_once_t at_once_flag;
#define AT_ONCE_INIT PTHREAD_ONCE_INIT
static inline void at_once(at_once_flag* flag, void (*function)(void)) { pthread_once(flag, function); }

static inline void* at_aligned(size_t bytes) {
    void* block;
    return posix_memalign(&block, AT_ALIGN, bytes) ? NULL : block;
}
static inline void at_release(void* block) { free(block); }

typedef pthread_key_t at_local;
static inline int at_local_open(at_local* local) { return pthread_key_create(local, free) ? -1 : 0; }
static inline void* at_local_get(at_local local) { return pthread_getspecific(local); }
static inline int at_local_set(at_local local, void* block) { return pthread_setspecific(local, block) ? -1 : 0; }
#endif

#if defined(__x86_64__) || defined(_M_X64)
#define AT_ARITHMETIC 0xe040u /* of MXCSR: subnormal results and operands as zero, direction of rounding */
static inline uint64_t at_arithmetic(void) { return __builtin_ia32_stmxcsr() & AT_ARITHMETIC; }
static inline void at_arithmetic_set(uint64_t how) {
    __builtin_ia32_ldmxcsr((__builtin_ia32_stmxcsr() & ~AT_ARITHMETIC) | (unsigned)how);
}
#elif defined(__aarch64__)
#define AT_ARITHMETIC 0x07c80000u /* of FPCR: the same, and NaN without payload */
static inline uint64_t at_arithmetic(void) {
    uint64_t how;
    __asm__ volatile("mrs %0, fpcr" : "=r"(how));
    return how & AT_ARITHMETIC;
}
static inline void at_arithmetic_set(uint64_t how) {
    uint64_t rest;
    __asm__ volatile("mrs %0, fpcr" : "=r"(rest));
    __asm__ volatile("msr fpcr, %0" : : "r"((rest & ~(uint64_t)AT_ARITHMETIC) | how));
}
#else
static inline uint64_t at_arithmetic(void) { return 0; }
static inline void at_arithmetic_set(uint64_t how) { (void)how; }
#endif

#endif
