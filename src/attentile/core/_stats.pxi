# Statistics of the weights without the matrix of weights: a second pass over the scores, with the maximum m and the sum
# l of each row known, so that a chunk of scores becomes final weights exp(s - m) / l at once and can be reduced and
# forgotten. m and l are kept apart: their logsumexp m + log l is rounded to its size, that of the scores, and
# exp(s - lse) is off by as much.
#
#     for each task = (batch, query head)                one thread: `received` has a single writer
#         for each block of query rows, each chunk of keys that some row of it may see:
#             scores -> weights, and what the entropy of each row needs                    C tile
#             rows of weights -> weight received by each key, strongest keys, chosen rows  if asked for
#
# Every sum over keys or rows ends in double, and in an order that depends on no block: the statistics of a row have the
# same bits in any group of rows, on any number of threads and on every instruction set with FMA. l is that of the first
# pass, summed once more with more digits (`total` of Job).
#
# The entropy. With x = s - m in units of log 2, e = 2^x, Z the sum of e and l = Z + sink, it is
#
#     - sum (e / l) log2 (e / l) = (Z log2 l - sum e x) / l,       two terms that are not negative
#
# of which the first is small where one key has nearly all the weight. So l is held as 1 + u: as many ones as keys have
# the maximum, which are counted, and a sum of all else.
#
# Memory is O(L + S) per head: nothing here grows with L x S. Included by _core.pyx after _pass.pxi.

cdef enum:
    MIN_TOP_ROOM = 8                            # candidates of a row that are not sorted yet, at least; and that many
    TOP_ROOM = 3                                #   for each key that is wanted
    LARGE_ROOM = 1024                           # from here on fewer rows at a time, so that their candidates stay in L2

# Where the results go; data is NULL for what was not asked for. [batch][head] and then:
cdef struct Stats:
    Strided m, total                            # [query] in: as the first pass has left them, without the sink
    Strided entropy, largest                    # [query]
    Strided received                            # [key], double
    Strided top_weights                         # [query][k]
    Strided top_keys                            # [query][k], Py_ssize_t
    Strided rows                                # [chosen][key]
    const Py_ssize_t *chosen                    # [query] -> index into rows, or -1
    Py_ssize_t k
    Job *job

# What a task has of the rows of a block, beside Block: [row], in the slot's scratch.
cdef struct RowStats:
    double *total                               # l without the sink; NaN for a row that is NaN
    double *sink                                # what the sink adds
    double *rest                                # sum of e of the keys below the maximum
    double *moment                              # sum of e x
    at_top *tops
    char *top_scratch
    char *line                                  # [row][AT_CHUNK] weights
    bint some_nan                               # some row is NaN
    Py_ssize_t b, head, i                       # item, query head, query of row 0


cdef inline bint wants_rows(const Stats *stats) noexcept nogil:
    """Whether something needs the weights row by row."""
    return stats.received.data != NULL or stats.top_weights.data != NULL or stats.rows.data != NULL


cdef inline Py_ssize_t top_room(const Stats *stats) noexcept nogil:
    return max(<Py_ssize_t> MIN_TOP_ROOM, min(TOP_ROOM * stats.k, stats.job.keys))


cdef Py_ssize_t row_stats_bytes(const Stats *stats) noexcept nogil:
    """Bytes that open_row_stats() and open_tops() take."""
    cdef Py_ssize_t rows = largest_pitch(stats.job), item = <Py_ssize_t> stats.job.tiles.itemsize
    cdef Py_ssize_t nbytes = aligned(sizeof(RowStats)) + 4 * aligned(rows * <Py_ssize_t> sizeof(double))
    if wants_rows(stats):
        nbytes += aligned(rows * AT_CHUNK * item)
    if stats.top_weights.data != NULL:
        nbytes += (aligned(rows * <Py_ssize_t> sizeof(at_top)) + aligned(AT_TOP_SCRATCH(top_room(stats)))
                   + 2 * rows * aligned((top_room(stats) + AT_WORD) * <Py_ssize_t> sizeof(double)))
    return nbytes


cdef RowStats *open_row_stats(const Stats *stats, char **free_bytes) noexcept nogil:
    """From the slot's scratch, for all blocks of a task."""
    cdef Py_ssize_t rows = largest_pitch(stats.job), item = <Py_ssize_t> stats.job.tiles.itemsize, r
    cdef Py_ssize_t doubles = rows * <Py_ssize_t> sizeof(double), candidates
    cdef RowStats *found = <RowStats *> take(free_bytes, sizeof(RowStats))
    found.total = <double *> take(free_bytes, doubles)
    found.sink = <double *> take(free_bytes, doubles)
    found.rest = <double *> take(free_bytes, doubles)
    found.moment = <double *> take(free_bytes, doubles)
    if wants_rows(stats):
        found.line = take(free_bytes, rows * AT_CHUNK * item)
    if stats.top_weights.data != NULL:
        candidates = (top_room(stats) + AT_WORD) * <Py_ssize_t> sizeof(double)
        found.tops = <at_top *> take(free_bytes, rows * <Py_ssize_t> sizeof(at_top))
        found.top_scratch = take(free_bytes, AT_TOP_SCRATCH(top_room(stats)))
        for r in range(rows):
            found.tops[r].values = take(free_bytes, candidates)
            found.tops[r].keys = <Py_ssize_t *> take(free_bytes, candidates)
            found.tops[r].k = min(stats.k, stats.job.keys)
            found.tops[r].room = top_room(stats)
    return found


cdef void start_stats(const Stats *stats, Block *block, Shared *shared, RowStats *found) noexcept nogil:
    """Each row's m, its total and, in shared.beta, 1 / l, which is 0 for what is no row and for rows without keys.

    A NaN row has m = 0 and l = 1 there: spoil_rows() makes its scores NaN or -inf.
    """
    cdef const Job *job = stats.job
    cdef Py_ssize_t item = <Py_ssize_t> job.tiles.itemsize, r
    cdef double m, l
    found.some_nan = False
    fill_reals(block.m, item, block.pitch, 0)
    fill_reals(shared.beta, item, block.pitch, 0)
    for r in range(block.pitch):
        found.total[r] = found.sink[r] = found.rest[r] = found.moment[r] = 0
    for r in range(block.n_rows):
        m = real_at(at(&stats.m, found.b, found.head, found.i + r), item)
        l = real_at(at(&stats.total, found.b, found.head, found.i + r), sizeof(double))
        if l == 0 and sees_any_key(job, block, r):             # allowed keys that all score -inf
            l = NAN
        found.total[r] = l
        if job.sinks != NULL and l != 0:
            found.sink[r] = at_exp2(block.row_sink[r] - m)
            l += found.sink[r]
        if l != l:
            found.total[r] = NAN
            found.some_nan = True
            set_real(shared.beta + r * item, item, 1)
        elif l > 0:                                            # infinite: the sink takes all
            set_real(block.m + r * item, item, m)
            set_real(shared.beta + r * item, item, 1 / l)
        if stats.top_weights.data != NULL:
            found.tops[r].n = 0
            found.tops[r].limit = 0


cdef void spoil_rows(const Job *job, const Block *block, const RowStats *found, char *st, Py_ssize_t key,
                     Py_ssize_t n) noexcept nogil:
    """Scores of the keys key .. key + n in NaN rows: NaN for each key that the row uses, -inf for the others."""
    cdef Py_ssize_t item = <Py_ssize_t> job.tiles.itemsize, r, j
    for r in range(block.n_rows):
        if found.total[r] != found.total[r]:
            for j in range(n):
                set_real(st + (j * block.pitch + r) * item, item,
                         NAN if sees_key(job, block, r, key + j) else -INFINITY)


cdef void reduce_rows(const Stats *stats, Block *block, Shared *shared, RowStats *found, const Run *run) noexcept nogil:
    """The rows of a run of weights: what each key receives, strongest keys, chosen rows."""
    cdef const Job *job = stats.job
    cdef Py_ssize_t item = <Py_ssize_t> job.tiles.itemsize, r, place
    cdef Py_ssize_t key = run.chunk + run.start, n = run.stop - run.start
    for r in range(block.n_rows):
        block.weight_rows[r] = found.line + r * AT_CHUNK * item
    fill_reals(shared.unused, item, block.pitch, 1)
    job.tiles.unpack(block.weight_rows, shared.st + run.start * block.pitch * item, shared.unused, block.n_rows,
                     block.vectors, n)
    if stats.received.data != NULL:
        job.tiles.add_rows(<double *> at(&stats.received, found.b, found.head, 0) + key,
                           <const char **> block.weight_rows, block.n_rows, n)
    for r in range(block.n_rows):
        if stats.top_weights.data != NULL:
            job.tiles.keep_top(&found.tops[r], block.weight_rows[r], n, key, found.top_scratch)
        if stats.rows.data != NULL:
            place = stats.chosen[found.i + r]
            if place >= 0:
                memcpy(at(&stats.rows, found.b, found.head, place) + key * item, block.weight_rows[r], n * item)


cdef double log2_1p(double u) noexcept nogil:
    """log2(1 + u) for u >= 0, without losing a small u in the sum: its rounding error cancels in the quotient."""
    cdef double sum = 1 + u
    return u * LOG2E if sum == 1 else at_log2(sum) * (u / (sum - 1))


cdef double entropy_of(const RowStats *found, Py_ssize_t r) noexcept nogil:
    """In nats, see above."""
    cdef double total = found.total[r], rest = found.rest[r], most, above
    if total == 0 or found.sink[r] == INFINITY:
        return 0
    # The digits of total leave no doubt for fewer than about 10^6 ones; of more, one counts little.
    most = max(1.0, nearbyint(total - rest))
    above = most - 1 + rest + found.sink[r]
    return ((most + rest) * log2_1p(above) - found.moment[r]) / (1 + above) * LN2


cdef void finish_stats(const Stats *stats, const Block *block, const Shared *shared, RowStats *found) noexcept nogil:
    cdef Py_ssize_t item = <Py_ssize_t> stats.job.tiles.itemsize, r, i
    cdef double x
    for r in range(block.n_rows):
        i = found.i + r
        if stats.entropy.data != NULL:
            x = found.total[r]
            set_real(at(&stats.entropy, found.b, found.head, i), item, entropy_of(found, r) if x == x else x)
        if stats.largest.data != NULL:          # the weight of the key with the maximum: 2^0 / l
            x = found.total[r]
            set_real(at(&stats.largest, found.b, found.head, i), item,
                     real_at(shared.beta + r * item, item) if x == x else x)
        if stats.top_weights.data != NULL:
            stats.job.tiles.store_top(&found.tops[r], at(&stats.top_weights, found.b, found.head, i),
                                      <Py_ssize_t *> at(&stats.top_keys, found.b, found.head, i), found.top_scratch)


cdef void stats_task(void *stats_pointer, Py_ssize_t index, int slot) noexcept nogil:
    """One query head."""
    cdef const Stats *stats = <const Stats *> stats_pointer
    cdef const Job *job = stats.job
    cdef Py_ssize_t heads = job.kv_heads * job.group, kv_head, c
    cdef char *free_bytes = job.scratch + slot * job.scratch_per_slot
    cdef Shared *shared = open_shared(job, &free_bytes)
    cdef RowStats *found = open_row_stats(stats, &free_bytes)
    cdef Block *block = <Block *> take(&free_bytes, sizeof(Block))
    cdef Run run
    cdef Rows k
    shared.n_ahead = 0
    found.b = index // heads
    found.head = index % heads
    kv_head = found.head // job.group
    found.i = 0
    while found.i < job.queries:
        open_block(job, block, free_bytes, found.b, kv_head, found.head % job.group * job.queries + found.i)
        block.n_rows = min(block.n_rows, job.queries - found.i)    # a block of the pass may run on into the next head
        pack_rows(job, block, shared)
        start_stats(stats, block, shared, found)
        for c in range(block.lo // AT_CHUNK, chunks_before(block.hi)):
            run.chunk = c * AT_CHUNK
            k = bring_keys(job, shared, found.b, kv_head, c, block.lo, block.hi)
            if score_chunk(job, block, shared, k, NULL, run.chunk, &run.start, &run.stop):
                reduce_chunk(stats, block, shared, found, &run)
        finish_stats(stats, block, shared, found)
        found.i += block.n_rows


cdef void reduce_chunk(const Stats *stats, Block *block, Shared *shared, RowStats *found,
                       const Run *run) noexcept nogil:
    """A run of scores."""
    cdef const Job *job = stats.job
    cdef Py_ssize_t n = run.stop - run.start
    cdef char *st = shared.st + run.start * block.pitch * <Py_ssize_t> job.tiles.itemsize
    if found.some_nan:
        spoil_rows(job, block, found, st, run.chunk + run.start, n)
    job.tiles.measure(st, n, block.m, shared.beta, found.rest, found.moment, block.vectors)
    if wants_rows(stats):
        reduce_rows(stats, block, shared, found, run)


cdef int run_statistics(void *stats_pointer, int threads) except -1 nogil:
    cdef Stats *stats = <Stats *> stats_pointer
    cdef Job *job = stats.job
    job.tasks = job.batch * job.kv_heads * job.group
    job.blocks_per_task = 1
    job.block_rows = job.tiles.max_vectors * job.tiles.lanes // 4 * 4      # as add_rows() takes them
    if stats.top_weights.data != NULL and top_room(stats) > LARGE_ROOM:
        job.block_rows = max(4, job.tiles.lanes)
    threads = 1 if is_small(job) else <int> min(<Py_ssize_t> threads, job.tasks)
    size_scratch(job)
    job.scratch_per_slot += row_stats_bytes(stats)
    job.scratch = <char *> scratch_of(threads * job.scratch_per_slot)
    at_pool_run(stats_task, stats, job.tasks, threads)
    return 0
