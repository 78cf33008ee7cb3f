/* Stress test of the thread pool alone, for a sanitizer or a plain build:
 *
 *     gcc -std=c11 -O1 -g -fsanitize=thread -I src/attentile/core/kernels tests/fuzz/pool_stress.c \
 *         src/attentile/core/kernels/pool.c -o pool_stress -pthread && ./pool_stress 100000 all
 *
 * Arguments: rounds, and "all", "nofork" or "fork". Everything a task touches is plain memory, so that a thread sanitizer
 * sees each access that the pool does not order; every region is checked: each task ran once, in a slot that no other
 * thread had, and what it wrote is there when the call returns. */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels.h"

#define TASKS 37
#define SLOTS 5
#define CALLERS 16
#define SLOT_BYTES 192

typedef struct {
    long ran[TASKS], region; /* written by the tasks */
    pthread_t owner[SLOTS];  /* who works in a slot, during this region */
    int owned[SLOTS];
    char* scratch;
    ptrdiff_t slot_bytes;
    int threads, nested;
} region_job;

static _Thread_local int may_have_signals;
static atomic_int stray_signals, signals;

static void fail(const char* what) {
    fprintf(stderr, "pool_stress: %s\n", what);
    abort();
}

static void on_signal(int number) {
    (void)number;
    atomic_fetch_add(&signals, 1);
    if (!may_have_signals) atomic_fetch_add(&stray_signals, 1);
}

static void small_task(void* raw, ptrdiff_t index, int slot) {
    region_job* job = raw;
    if (slot < 0 || slot >= SLOTS) fail("a slot beyond the number of threads");
    job->ran[index]++;
}

static void task(void* raw, ptrdiff_t index, int slot) {
    region_job* job = raw;
    if (slot < 0 || slot >= job->threads) fail("a slot beyond the number of threads");
    if (!job->owned[slot]) {
        job->owned[slot] = 1;
        job->owner[slot] = pthread_self();
    }
    if (!pthread_equal(job->owner[slot], pthread_self())) fail("two threads in one slot");
    char* mine = job->scratch + slot * job->slot_bytes;
    memset(mine, (int)index, (size_t)job->slot_bytes);
    job->ran[index]++;
    if (job->nested && index == 0) { /* as a callback that calls the library again */
        region_job inner = {.threads = SLOTS};
        at_pool_run(small_task, &inner, 3, SLOTS);
        if (inner.ran[0] != 1 || inner.ran[2] != 1) fail("a nested region was not done");
    }
    for (ptrdiff_t x = 0; x < job->slot_bytes; x++)
        if (mine[x] != (char)index) fail("another task wrote to this scratch");
}

static void run_region(region_job* job, unsigned long number, ptrdiff_t slot_bytes) {
    const ptrdiff_t tasks = (ptrdiff_t)(number % TASKS) + 1;
    const int threads = (int)(number / TASKS % SLOTS) + 1;
    memset(job, 0, sizeof *job);
    job->threads = threads;
    job->slot_bytes = slot_bytes;
    job->nested = number % 11 == 0;
    job->scratch = at_scratch((size_t)(threads * slot_bytes));
    if (!job->scratch) fail("no scratch");
    if ((size_t)job->scratch % AT_ALIGN) fail("scratch is not aligned");
    at_pool_run(task, job, tasks, threads);
    for (ptrdiff_t x = 0; x < TASKS; x++)
        if (job->ran[x] != (x < tasks)) fail("a task ran twice, or not at all");
}

static void run_regions(unsigned long rounds, unsigned long first) {
    region_job job; /* the same stack frame for all: a late worker of the last region would be seen */
    for (unsigned long n = 0; n < rounds; n++) run_region(&job, first + n * 7, SLOT_BYTES);
}

/* A thread of ours: signals wait until it has said that it may have them. */
static pthread_t started(void* (*body)(void*), size_t number) {
    pthread_t thread;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (pthread_create(&thread, NULL, body, (void*)number)) fail("no thread");
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return thread;
}

static void take_signals(void) {
    sigset_t none;
    may_have_signals = 1;
    sigemptyset(&none);
    pthread_sigmask(SIG_SETMASK, &none, NULL);
}

static unsigned long rounds_of_a_caller;

static void* caller(void* number) {
    take_signals();
    run_regions(rounds_of_a_caller, (unsigned long)(size_t)number);
    return NULL;
}

static void concurrent_callers(unsigned long rounds) {
    pthread_t threads[CALLERS];
    rounds_of_a_caller = rounds;
    for (size_t x = 0; x < CALLERS; x++) threads[x] = started(caller, x);
    for (size_t x = 0; x < CALLERS; x++) pthread_join(threads[x], NULL);
}

/* Grows the scratch of threads that end afterwards: it must be freed with them (a leak sanitizer sees it). */
static void* growing(void* unused) {
    (void)unused;
    region_job job;
    take_signals();
    for (ptrdiff_t bytes = 64; bytes < 300000; bytes += bytes / 3) run_region(&job, (unsigned long)bytes, bytes);
    if (at_scratch((size_t)-1) || at_scratch((size_t)-5000)) fail("scratch of the whole address space");
    run_region(&job, 1, 64); /* after a failure the next call finds memory again */
    return NULL;
}

static void scratch_of_threads(unsigned long threads) {
    for (unsigned long n = 0; n < threads; n++) {
        pthread_join(started(growing, n), NULL);
    }
}

static void in_child(void) {
    alarm(60);
    if (at_pool_workers() != 0) _exit(3);
    run_regions(40, 3);
    if (at_pool_workers() == 0) _exit(4);
    _exit(0);
}

static atomic_int keep_going;

static void* busy_caller(void* number) {
    take_signals();
    while (atomic_load(&keep_going)) run_regions(1, (unsigned long)(size_t)number);
    return NULL;
}

/* Forks at any moment of regions that other threads run; the children run regions of their own. */
static void forks(unsigned long children) {
    pthread_t threads[2];
    atomic_store(&keep_going, 1);
    for (size_t x = 0; x < 2; x++) threads[x] = started(busy_caller, x + 60);
    for (unsigned long n = 0; n < children; n++) {
        int status;
        run_regions(1, n + 100);
        const pid_t child = fork();
        if (child == 0) in_child();
        if (child < 0) fail("no process");
        while (waitpid(child, &status, 0) < 0) continue;
        if (status != 0) fail("a forked child failed or hung");
    }
    atomic_store(&keep_going, 0);
    for (size_t x = 0; x < 2; x++) pthread_join(threads[x], NULL);
}

int main(int count, char** arguments) {
    const unsigned long rounds = count > 1 ? strtoul(arguments[1], NULL, 10) : 1000;
    const char* what = count > 2 ? arguments[2] : "all";
    may_have_signals = 1;
    if (strcmp(what, "fork")) {
        struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
        struct itimerval every = {{0, 500}, {0, 500}}, never = {{0, 0}, {0, 0}};
        sigaction(SIGALRM, &action, NULL);
        setitimer(ITIMER_REAL, &every, NULL);
        run_regions(rounds, 0);
        concurrent_callers(rounds / CALLERS + 1);
        scratch_of_threads(rounds / 5000 + 2);
        setitimer(ITIMER_REAL, &never, NULL);
        signal(SIGALRM, SIG_DFL);
        if (atomic_load(&stray_signals)) fail("a worker got a signal");
    }
    if (strcmp(what, "nofork")) forks(rounds / 500 + 3);
    printf("pool_stress: %lu rounds, %d workers, %d signals: all right\n", rounds, at_pool_workers(),
           atomic_load(&signals));
    return 0;
}
