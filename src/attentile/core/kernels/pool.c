/* The thread pool. One region of work at a time: tasks 0 .. n-1 are handed out by one atomic ticket, to the caller
 * as well as to the workers.
 *
 * Why our own: a second OpenMP runtime beside NumPy's spinning BLAS threads makes each of them wait for the other's
 * turn, and it hangs in a forked child. Here:
 *
 *   - The caller waits only for tasks that a worker has claimed. A worker that comes late, or was preempted before
 *     its first claim, costs nothing: the caller does the work alone. The ticket carries the number of the region,
 *     so a late worker cannot take a task of the next one.
 *   - A second Python thread that finds the pool busy runs its tasks itself; nobody queues.
 *   - Idle workers spin for some 20 microseconds, so that back-to-back calls find them awake, then sleep, each on a
 *     condition of its own: a region wakes those that it has work for, however many there are.
 *   - Workers compute as their caller does: with its direction of rounding and its treatment of subnormal numbers.
 *   - Signals are blocked in workers; a forked child starts with an empty pool.
 *
 * What the operating system gives is in threads.h, for POSIX and for Win32. */
#include "threads.h"

#include <stdatomic.h>

#include "kernels.h"

#define MAX_WORKERS 255
/* Measured on Zen 4: long enough to be awake for the next call from Python (0.25 ms of work take 0.25 ms on two threads
 * back to back, 0.30 with a tenth of it), short enough to leave the core to a BLAS call in between (a 384 x 384 product
 * and that work, in turns: 1.05 times the sum of the two alone; with four times as much 1.13 to 1.4 times). */
#define SPIN_NANOSECONDS 24000
#define SPINS_BEFORE_YIELD 1000 /* some 20 to 50 microseconds */

/* ticket = region << 32 | next task. An open region has an odd number; an even one means that none is open. */
static _Atomic uint64_t ticket;
static _Atomic(at_task) the_task;
static _Atomic(void*) the_job;
static _Atomic uint64_t the_arithmetic;
static _Atomic(ptrdiff_t) the_tasks, finished;
static _Atomic int helpers; /* workers 0 .. helpers - 1 may join the open region */

static at_lock busy = AT_LOCK_INIT; /* held by the caller whose region is open */
static at_lock sleep_lock = AT_LOCK_INIT;
static at_wake wake[MAX_WORKERS]; /* each made before its worker is */
static _Atomic int asleep[MAX_WORKERS];
static at_wake done = AT_WAKE_INIT;
static _Atomic int waiting; /* the caller sleeps on `done` */
static _Atomic int workers;
static at_once_flag once = AT_ONCE_INIT;
static ptrdiff_t spin_rounds; /* in SPIN_NANOSECONDS, on this processor */
static at_local scratch;
static int no_scratch; /* the system had no thread-local pointer left */

static uint32_t current_region(void) { return (uint32_t)(atomic_load(&ticket) >> 32); }

static int is_open(uint32_t region) { return (int)(region & 1); }

/* Takes tasks of `region` until none is left or the region is over; returns how many were run. */
static ptrdiff_t take_tasks(uint32_t region, int slot) {
    ptrdiff_t ran = 0;
    uint64_t t = atomic_load(&ticket), own = at_arithmetic();
    while (t >> 32 == region) {
        const at_task task = atomic_load_explicit(&the_task, memory_order_relaxed);
        void* job = atomic_load_explicit(&the_job, memory_order_relaxed);
        const uint64_t arithmetic = atomic_load_explicit(&the_arithmetic, memory_order_relaxed);
        const ptrdiff_t index = (ptrdiff_t)(t & 0xffffffffu);
        if (index >= atomic_load_explicit(&the_tasks, memory_order_relaxed)) break;
        /* Success proves that the region is still open, hence that what was read above was its own. */
        if (!atomic_compare_exchange_weak(&ticket, &t, t + 1)) continue;
        if (arithmetic != own) at_arithmetic_set(own = arithmetic);
        task(job, index, slot);
        ran++;
        t = atomic_load(&ticket);
    }
    return ran;
}

static void report(ptrdiff_t ran) {
    if (ran == 0) return;
    const ptrdiff_t tasks = atomic_load(&the_tasks);
    if (atomic_fetch_add(&finished, ran) + ran == tasks && atomic_load(&waiting)) {
        at_lock_take(&sleep_lock);
        at_wake_one(&done);
        at_lock_drop(&sleep_lock);
    }
}

/* Is there a region that worker `mine` may join and that is not `last`? Then it is *region. */
static int is_wanted(int mine, uint32_t last, uint32_t* region) {
    *region = current_region();
    return is_open(*region) && *region != last && mine < atomic_load(&helpers);
}

/* Waits for such a region; spins, then sleeps. */
static uint32_t next_region(int mine, uint32_t last) {
    uint32_t region;
    for (ptrdiff_t spin = 0; spin < spin_rounds; spin++) {
        if (is_wanted(mine, last, &region)) return region;
        AT_RELAX();
    }
    at_lock_take(&sleep_lock);
    atomic_store(&asleep[mine], 1);
    while (!is_wanted(mine, last, &region)) at_wake_wait(&wake[mine], &sleep_lock);
    atomic_store(&asleep[mine], 0);
    at_lock_drop(&sleep_lock);
    return region;
}

static void wake_helpers(int wanted) {
    const int there = atomic_load(&workers);
    int locked = 0;
    for (int worker = 0; worker < wanted && worker < there; worker++) {
        if (!atomic_load(&asleep[worker])) continue;
        if (!locked) at_lock_take(&sleep_lock);
        locked = 1;
        at_wake_one(&wake[worker]);
    }
    if (locked) at_lock_drop(&sleep_lock);
}

static at_thread_result AT_THREAD_CALL work(void* number) {
    const int mine = (int)(intptr_t)number;
    at_thread_spread();
    for (uint32_t region = 0;;) {
        region = next_region(mine, region);
        report(take_tasks(region, mine + 1));
    }
    return 0;
}

static void start_workers(int wanted) {
    if (wanted > MAX_WORKERS) wanted = MAX_WORKERS;
    while (atomic_load(&workers) < wanted) {
        const int next = atomic_load(&workers);
        at_wake_reset(&wake[next]);
        atomic_store(&asleep[next], 0);
        /* No thread to be had: the region runs with those that are there, the caller at least. */
        if (at_thread_start(work, (void*)(intptr_t)next)) break;
        atomic_fetch_add(&workers, 1);
    }
}

/* In a forked child no worker exists, and locks may be held by threads that do not either. */
static void after_fork(void) {
    at_lock_reset(&busy);
    at_lock_reset(&sleep_lock);
    at_wake_reset(&done);
    atomic_store(&workers, 0);
    atomic_store(&waiting, 0);
    atomic_store(&ticket, (uint64_t)((current_region() | 1) + 1) << 32); /* closed, whatever was open */
}

/* How long a round of a spin loop takes differs by a factor of ten between processors. */
static void measure_spin(void) {
    uint64_t took = 0, sink = 0;
    ptrdiff_t rounds = 64;
    while (took < SPIN_NANOSECONDS / 2 && rounds < (1 << 20)) { /* long enough for a clock of microseconds */
        rounds *= 2;
        const uint64_t start = at_nanoseconds();
        for (ptrdiff_t round = 0; round < rounds; round++) {
            sink += current_region();
            AT_RELAX();
        }
        took = at_nanoseconds() - start;
    }
    (void)sink;
    const ptrdiff_t found = (ptrdiff_t)(SPIN_NANOSECONDS * (double)rounds / (double)(took ? took : 1));
    /* Somebody else may have run meanwhile, and a clock may be strange. */
    if (found < 200)
        spin_rounds = 200;
    else
        spin_rounds = found < 20000 ? found : 20000;
}

static void initialise(void) {
    measure_spin();
    at_after_fork(after_fork);
    no_scratch = at_local_open(&scratch);
}

static void wait_for(ptrdiff_t tasks) {
    for (ptrdiff_t spin = 0; spin < spin_rounds; spin++) {
        if (atomic_load_explicit(&finished, memory_order_acquire) == tasks) return;
        AT_RELAX();
    }
    at_lock_take(&sleep_lock);
    atomic_store(&waiting, 1);
    while (atomic_load(&finished) != tasks) at_wake_wait(&done, &sleep_lock);
    atomic_store(&waiting, 0);
    at_lock_drop(&sleep_lock);
}

void at_pool_run(at_task task, void* job, ptrdiff_t tasks, int threads) {
    at_once(&once, initialise);
    if (threads > tasks) threads = (int)tasks;
    if (threads <= 1 || tasks > 0x7fffffff || !at_lock_try(&busy)) {
        for (ptrdiff_t index = 0; index < tasks; index++) task(job, index, 0);
        return;
    }
    start_workers(threads - 1);
    const uint32_t region = current_region() + 1; /* even before: we hold `busy` */
    atomic_store(&the_task, task);
    atomic_store(&the_job, job);
    atomic_store(&the_arithmetic, at_arithmetic());
    atomic_store(&the_tasks, tasks);
    atomic_store(&finished, 0);
    atomic_store(&helpers, threads - 1);
    atomic_store(&ticket, (uint64_t)region << 32);
    wake_helpers(threads - 1);
    atomic_fetch_add(&finished, take_tasks(region, 0));
    wait_for(tasks);
    atomic_store(&ticket, (uint64_t)(region + 1) << 32);
    at_lock_drop(&busy);
}

/* Tasks are handed out in their order, so of those that run the first one waits for none that is not running. */
void at_pass(int64_t* passed, int64_t place) {
    atomic_store_explicit((_Atomic int64_t*)passed, place, memory_order_release);
}

void at_await(const int64_t* passed, int64_t place) {
    for (int round = 0; atomic_load_explicit((const _Atomic int64_t*)passed, memory_order_acquire) < place; round++)
        if (round < SPINS_BEFORE_YIELD)
            AT_RELAX();
        else
            at_thread_yield(); /* it may be waiting for this processor */
}

int at_pool_workers(void) { return atomic_load(&workers); }

/* One buffer per calling thread, grown and kept: fresh pages cost more than small calls do. The block found through
 * `scratch` starts with its size; it is released when the thread ends. */
void* at_scratch(size_t bytes) {
    typedef struct {
        size_t size;
    } header;
    at_once(&once, initialise);
    if (no_scratch) return NULL;
    header* block = at_local_get(scratch);
    if (!block || block->size < bytes) {
        const size_t size = (bytes + 4095) / 4096 * 4096;
        if (size < bytes) return NULL;
        at_local_set(scratch, NULL);
        at_release(block);
        block = at_aligned(size + AT_ALIGN);
        if (block && at_local_set(scratch, block)) {
            at_release(block);
            block = NULL;
        }
        if (!block) return NULL;
        block->size = size;
    }
    return (char*)block + AT_ALIGN;
}
