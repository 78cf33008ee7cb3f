/* Who uses a cache: nobody (0), n threads that read it (n), or one that changes it (-1). Nobody waits: who may not enter
 * is told so. Atomic, so that it holds where Python runs several threads at once, and while the core runs without the
 * interpreter's lock. */
#ifndef AT_GUARD_H
#define AT_GUARD_H

/* 1: the caller is in, until at_guard_leave(); 0: it must not touch the cache. */
static inline int at_guard_enter(int* users, int change) {
    int now = __atomic_load_n(users, __ATOMIC_RELAXED);
    do {
        if (change ? now != 0 : now < 0) return 0;
    } while (!__atomic_compare_exchange_n(users, &now, change ? -1 : now + 1, 1, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED));
    return 1;
}

static inline void at_guard_leave(int* users, int change) {
    __atomic_fetch_add(users, change ? 1 : -1, __ATOMIC_RELEASE);
}

#endif
