# Statistics of the weights without the matrix of weights: a second pass over the scores, with the maximum m and the sum
# l of each row known, so that a chunk of scores becomes final weights exp(s - m) / l at once and can be reduced and
# forgotten. m and l are kept apart: their logsumexp m + log l is rounded to its size, that of the scores, and
# exp(s - lse) is off by as much.
#
#     for each task = (batch, query head)                one thread: `received` has a single writer
#         for each block of query rows, each chunk of keys that some row of it may see:
#             scores -> weights, entropy, largest weight, weight received by each key      C tile
#             rows of weights -> the k strongest keys, chosen rows                         if asked for
#
# Memory is O(L + S) per head: nothing here grows with L x S. Included by _core.pyx after _pass.pxi.

# Where the results go; data is NULL for what was not asked for. [batch][head] and then:
cdef struct Stats:
    Strided m, l                                # [query] in: as the first pass has left them, without the sink
    Strided entropy, largest, received          # [query], [query], [key]
    Strided top_weights                         # [query][k]
    Strided top_keys                            # [query][k], Py_ssize_t
    Strided rows                                # [chosen][key]
    const Py_ssize_t *chosen                    # [query] -> index into rows, or -1
    Py_ssize_t k
    Job *job


cdef bint start_stats(const Job *job, const Stats *stats, Block *block, Shared *shared, char *log_l, Py_ssize_t b,
                      Py_ssize_t head, Py_ssize_t i) noexcept nogil:
    """m, log2(l) and, in shared.beta, 1 / l, which is 0 for what is no row and for rows without keys.

    Whether some row is NaN: such a row has the entropy and the largest weight NaN, and spoil_rows() its scores.
    """
    cdef size_t item = job.tiles.itemsize
    cdef Py_ssize_t r, to
    cdef double m, l
    cdef bint some_nan = False
    fill_reals(block.m, item, block.pitch, 0)
    fill_reals(log_l, item, block.pitch, 0)
    fill_reals(shared.beta, item, block.pitch, 0)
    fill_reals(block.l, item, block.pitch, 0)                  # entropy
    fill_reals(shared.alpha, item, block.pitch, 0)             # largest weight
    for r in range(block.n_rows):
        m = real_at(at(&stats.m, b, head, i + r), item)
        l = real_at(at(&stats.l, b, head, i + r), item)
        if l == 0 and sees_any_key(job, block, r):             # allowed keys that all score -inf
            l = NAN
        if job.sinks != NULL and l != 0:
            l += at_exp2(block.row_sink[r] - m)
            l = real_of(l, item)
        to = r * <Py_ssize_t> item
        if l != l:
            some_nan = True
            set_real(shared.beta + to, item, 1)
            set_real(block.l + to, item, NAN)
            set_real(shared.alpha + to, item, NAN)
        elif 0 < l < INFINITY:                                 # infinite: the sink takes all
            set_real(block.m + to, item, m)
            set_real(log_l + to, item, at_log2(l))
            set_real(shared.beta + to, item, 1 / l)
    return some_nan


cdef void spoil_rows(const Job *job, const Block *block, const Shared *shared, char *st, Py_ssize_t key,
                     Py_ssize_t n) noexcept nogil:
    """Scores of the keys key .. key + n in NaN rows: NaN for each key that the row uses, -inf for the others."""
    cdef Py_ssize_t item = <Py_ssize_t> job.tiles.itemsize, r, j
    cdef double largest
    for r in range(block.n_rows):
        largest = real_at(shared.alpha + r * item, item)
        if largest != largest:
            for j in range(n):
                set_real(st + (j * block.pitch + r) * item, item,
                         NAN if sees_key(job, block, r, key + j) else -INFINITY)


cdef struct Rows:                               # query i and those after it
    Py_ssize_t b, head, i                       # item, query head


cdef void keep_rows(const Job *job, const Stats *stats, Block *block, Shared *shared, char *line, const Rows *rows,
                    const Run *run) noexcept nogil:
    """The rows of a run of weights, one after the other: strongest keys and chosen rows. line: [rows][AT_CHUNK]."""
    cdef Py_ssize_t item = <Py_ssize_t> job.tiles.itemsize, r, place
    cdef Py_ssize_t key = run.chunk + run.start, n = run.stop - run.start
    cdef Py_ssize_t b = rows.b, head = rows.head, i = rows.i
    cdef char *st = shared.st + run.start * block.pitch * item
    for r in range(block.n_rows):
        block.weight_rows[r] = line + r * AT_CHUNK * item
    fill_reals(shared.unused, item, block.pitch, 1)
    job.tiles.unpack(block.weight_rows, st, shared.unused, block.n_rows, block.vectors, n)
    for r in range(block.n_rows):
        if stats.top_weights.data != NULL:
            job.tiles.keep_top(block.weight_rows[r], n, key, stats.k, at(&stats.top_weights, b, head, i + r),
                               <Py_ssize_t *> at(&stats.top_keys, b, head, i + r))
        if stats.rows.data != NULL:
            place = stats.chosen[i + r]
            if place >= 0:
                memcpy(at(&stats.rows, b, head, place) + key * item, block.weight_rows[r], n * item)


cdef void stats_task(void *stats_pointer, Py_ssize_t index, int slot) noexcept nogil:
    cdef const Stats *stats = <const Stats *> stats_pointer
    cdef const Job *job = stats.job
    cdef Py_ssize_t item = <Py_ssize_t> job.tiles.itemsize, heads = job.kv_heads * job.group
    cdef Py_ssize_t b = index // heads, head = index % heads, i = 0, c, r, key, n
    cdef Rows rows
    cdef Run run
    cdef char *free_bytes = job.scratch + slot * job.scratch_per_slot
    cdef char *st
    cdef char *received = NULL
    cdef Shared *shared = open_shared(job, &free_bytes)
    cdef char *line = free_bytes + job.block_bytes
    cdef char *log_l = line + block_line_bytes(job) + aligned(AT_CHUNK * item)
    cdef bint some_nan
    cdef Block *block = <Block *> take(&free_bytes, sizeof(Block))
    shared.n_ahead = 0
    while i < job.queries:
        open_block(job, block, free_bytes, b, head // job.group, head % job.group * job.queries + i)
        block.n_rows = min(block.n_rows, job.queries - i)      # a block of the pass may run on into the next head
        job.tiles.pack(block.qt, block.q_rows, block.n_rows, block.vectors, job.width, job.factor)
        some_nan = start_stats(job, stats, block, shared, log_l, b, head, i)
        rows.b = b
        rows.head = head
        rows.i = i
        for c in range(block.lo // AT_CHUNK, chunks_before(block.hi)):
            run.chunk = c * AT_CHUNK
            if not score_chunk(job, block, shared, key_chunk(job, b, head // job.group, c), NULL, run.chunk, &run.start,
                               &run.stop):
                continue
            key = run.chunk + run.start
            n = run.stop - run.start
            st = shared.st + run.start * block.pitch * item
            received = line + block_line_bytes(job)
            fill_reals(received, item, n, 0)
            if some_nan:
                spoil_rows(job, block, shared, st, key, n)
            job.tiles.measure(st, n, block.m, log_l, shared.beta, block.l, shared.alpha, received, block.vectors)
            if stats.received.data != NULL:
                add_reals(at(&stats.received, b, head, 0) + key * item, received, item, n)
            if stats.top_weights.data != NULL or stats.rows.data != NULL:
                keep_rows(job, stats, block, shared, line, &rows, &run)
        for r in range(block.n_rows):
            if stats.entropy.data != NULL:
                set_real(at(&stats.entropy, b, head, i + r), item, real_at(block.l + r * item, item) * LN2)
            if stats.largest.data != NULL:
                set_real(at(&stats.largest, b, head, i + r), item, real_at(shared.alpha + r * item, item))
        i += block.n_rows


cdef inline Py_ssize_t block_line_bytes(const Job *job) noexcept nogil:
    return aligned(largest_pitch(job) * AT_CHUNK * <Py_ssize_t> job.tiles.itemsize)


cdef inline void add_reals(char *to, const char *values, size_t itemsize, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t i, item = <Py_ssize_t> itemsize
    for i in range(n):
        set_real(to + i * item, itemsize, real_at(to + i * item, itemsize) + real_at(values + i * item, itemsize))


cdef int run_statistics(void *stats_pointer, int threads) except -1 nogil:
    cdef Stats *stats = <Stats *> stats_pointer
    cdef Job *job = stats.job
    job.tasks = job.batch * job.kv_heads * job.group
    job.blocks_per_task = 1
    job.block_rows = job.tiles.max_vectors * job.tiles.lanes
    threads = <int> min(<Py_ssize_t> threads, job.tasks)
    size_scratch(job)
    job.scratch_per_slot += (block_line_bytes(job) + aligned(AT_CHUNK * <Py_ssize_t> job.tiles.itemsize)
                             + aligned(largest_pitch(job) * <Py_ssize_t> job.tiles.itemsize))
    job.scratch = <char *> scratch_of(threads * job.scratch_per_slot)
    at_pool_run(stats_task, stats, job.tasks, threads)
    return 0
