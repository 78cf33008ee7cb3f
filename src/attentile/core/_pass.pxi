# The fused pass: scores, mask, softmax and values of one block of query rows, chunk by chunk of keys.
#
#     for each task = (batch b, key head h, up to MAX_BLOCKS blocks of query rows)      one thread, own scratch
#         pack      the blocks of Q                                                     once
#         for each chunk of 256 keys that some row may see:                             K, V chunk stays in L2
#             for each block:
#                 scores, bias, exclusion, softmax, values                              C tiles, S stays in L1/L2
#         unpack    the blocks of O
#
# Why blocked this way: a row of K or V is used by every query row, so a chunk of K and V (2 x 256 x 64 floats: 128 KiB)
# is read from memory once per task and from L2 once per block; the scores (256 x 48 floats: 48 KiB) never leave the
# core; Q and O of a block (2 x 48 x 64 floats: 24 KiB) stay in L1. Memory traffic per task is K + V + its part of Q and
# O, where the textbook formula writes and reads the L x S matrix four times.
#
# Query heads that share a key head (grouped-query attention) are simply more rows of the same keys: row r of a task
# is query r % L of head r // L of the group.
#
# Which keys a row may see is first an interval lo <= j < hi (causal, lengths, windows), then a boolean mask, then the
# -inf entries of a bias. Chunks that no row of a task sees are never visited. Where an interval ends inside a chunk,
# or where there is a mask, the block's rows become bit words, 32 keys each: a word that is 0 for all rows is skipped,
# one that is all ones runs the plain tiles, only the mixed ones test lanes.
#
# Everything here is dtype-blind: it moves byte pointers, the tiles know the type.
# Order of operations and layouts: kernels/kernels.h.
#
# Included by _core.pyx, which holds the imports and the entry functions.

# ---------------------------------------------------------------------------------------------------------------
# One chunk of keys
# ---------------------------------------------------------------------------------------------------------------
cdef inline void fetch_rows(Shared *shared, const char **rows, Py_ssize_t n_rows, Py_ssize_t offset,
                            Py_ssize_t nbytes) noexcept nogil:
    """The next scores fetch these rows while they compute."""
    cdef at_ahead *ahead = &shared.ahead[shared.n_ahead]
    ahead.rows = rows
    ahead.n_rows = n_rows
    ahead.offset = offset
    ahead.bytes = nbytes
    shared.n_ahead += 1


cdef inline void fetch_chunk(Shared *shared, const char *rows, Py_ssize_t stride, Py_ssize_t n,
                             Py_ssize_t nbytes) noexcept nogil:
    """The same for n rows of K or V."""
    cdef at_ahead *ahead = &shared.ahead[shared.n_ahead]
    ahead.rows = NULL
    ahead.data = rows
    ahead.stride = stride
    ahead.n_rows = n
    ahead.bytes = nbytes
    shared.n_ahead += 1


cdef struct Visit:                              # one chunk of keys during a task
    Py_ssize_t b, head                          # item, key head
    Py_ssize_t c                                # the chunk, of first .. end
    Py_ssize_t first, end

cdef struct Run:                                # keys chunk + start .. chunk + stop
    Py_ssize_t chunk                            # key that the chunk starts with
    Py_ssize_t start, stop
    int kind                                    # of their mask words


cdef inline void look_ahead(const Job *job, Block **blocks, Py_ssize_t n_blocks, Py_ssize_t x, Shared *shared,
                            const Visit *visit) noexcept nogil:
    """What the scores of block x in the visited chunk fetch.

    The first block fetches the chunk's values, the second one the next chunk's keys. Queries and outputs are touched
    once: in the first chunk the queries of the next block, in the last one the block's place in the output.
    """
    cdef Py_ssize_t b = visit.b, head = visit.head, c = visit.c
    shared.n_ahead = 0
    if not job.fetch:
        return
    if x == 0 and is_stored(job, b, c):
        fetch_chunk(shared, value_chunk(job, b, head, c), job.v.row, chunk_keys(job, c),
                    job.value_width * AT_SIZE_OF(job.v_format))
    elif x == 1 and c + 1 < visit.end and is_stored(job, b, c + 1):
        fetch_chunk(shared, key_chunk(job, b, head, c + 1), job.k.row, chunk_keys(job, c + 1),
                    job.width * AT_SIZE_OF(job.k_format))
    if c == visit.first and x + 1 < n_blocks:
        fetch_rows(shared, blocks[x + 1].q_rows, blocks[x + 1].n_rows, 0, job.width * AT_SIZE_OF(job.q_format))
    elif c == visit.end - 1 and job.out.data != NULL:
        fetch_rows(shared, <const char **> blocks[x].out_rows, blocks[x].n_rows, 0,
                   job.value_width * AT_SIZE_OF(job.out_format))


cdef void score_run(const Job *job, Block *block, Shared *shared, Rows k, const Run *run) noexcept nogil:
    """Final scores of a run of keys, and their maximum in shared.block_max. k: of the chunk.

    Every step leaves a maximum; only that of the last one counts, the others go to shared.unused.
    """
    cdef const at_tiles *tiles = job.tiles
    cdef Py_ssize_t start = run.start, n = run.stop - run.start, key = run.chunk + run.start
    cdef char *st = shared.st + start * block.pitch * <Py_ssize_t> tiles.itemsize
    cdef int steps = (job.softcap != 0) + (job.bias.data != NULL) + (job.slopes != NULL) + (run.kind == MIXED)
    if run.kind == NONE:
        fill_reals(st, tiles.itemsize, n * block.pitch, -INFINITY)
        return
    if 0 < job.bias.column <= <Py_ssize_t> sizeof(double):
        fetch_rows(shared, block.bias_rows, block.n_rows, key * job.bias.column, n * job.bias.column)
    tiles.scores[block.vectors - 1](st, shared.unused if steps else shared.block_max, block.qt,
                                    k.first + start * k.stride, k.stride, job.key_step, job.width, n,
                                    shared.ahead, shared.n_ahead)
    shared.n_ahead = 0
    if job.softcap != 0:
        steps -= 1
        tiles.softcap(st, shared.unused if steps else shared.block_max, block.vectors, n, -2 / job.softcap,
                      job.softcap * LOG2E)
        if shared.capped != NULL:
            memcpy(shared.capped + (st - shared.st), st, n * block.pitch * <Py_ssize_t> tiles.itemsize)
    if job.bias.data != NULL:
        steps -= 1
        tiles.add_bias(st, shared.unused if steps else shared.block_max, shared.bias_rows,
                       bring_bias(job, block, shared, key, n), block.n_rows, block.vectors, n)
    if job.slopes != NULL:
        steps -= 1
        place_rows(job, block, key)
        tiles.alibi(st, shared.unused if steps else shared.block_max, block.slope, block.position, block.vectors, n)
    if run.kind == MIXED:
        tiles.exclude(st, shared.block_max, shared.words + start // AT_WORD * block.pitch, block.vectors, n, job.fill)


cdef void find_head_scalars(const Job *job, Block *block, Py_ssize_t b, Py_ssize_t head, Py_ssize_t i) noexcept nogil:
    """What a row has from its head and position: ALiBi slope, sink. i: query of row 0."""
    cdef Py_ssize_t r, item = <Py_ssize_t> job.tiles.itemsize
    cdef Py_ssize_t first
    if job.slopes == NULL and job.sinks == NULL:
        return
    if job.slopes != NULL:
        fill_reals(block.slope, item, block.pitch, 0)
        first = item_of(job, b).first
    for r in range(block.n_rows):
        if job.slopes != NULL:
            block.row_position[r] = first + i
            set_real(block.slope + r * item, item, job.slopes[head] * LOG2E)
        if job.sinks != NULL:
            block.row_sink[r] = job.sinks[head] * LOG2E
        i += 1
        if i == job.queries:
            head, i = head + 1, 0


cdef void place_rows(const Job *job, Block *block, Py_ssize_t key) noexcept nogil:
    """block.position: that of each row, counted from this key; exact in float up to 2^24 keys away."""
    cdef Py_ssize_t r, item = <Py_ssize_t> job.tiles.itemsize
    fill_reals(block.position, item, block.pitch, 0)
    for r in range(block.n_rows):
        set_real(block.position + r * item, item, <double> (block.row_position[r] - key))


cdef inline void score_some(const Job *job, Block *block, Shared *shared, Rows k, const char *v,
                            const Run *run) noexcept nogil:
    if job.few:
        score_few(job, block, shared, k, v, run)
    else:
        score_run(job, block, shared, k, run)


cdef bint score_chunk(const Job *job, Block *block, Shared *shared, Rows k, const char *v, Py_ssize_t chunk,
                      Py_ssize_t *first, Py_ssize_t *end) noexcept nogil:
    """Scores of the keys of one chunk that the block's rows may see: chunk + first .. chunk + end. False: none.

    k: of the chunk. v: its first value, which is only fetched ahead.
    """
    cdef Py_ssize_t start, stop, w, item = <Py_ssize_t> job.tiles.itemsize
    cdef Py_ssize_t n = min(<Py_ssize_t> AT_CHUNK, job.keys - chunk)
    cdef Run run
    if 0 < job.structure.kept <= chunk and chunk + n <= block.gap_end:
        return False
    start = max(block.lo - chunk, 0) // AT_WORD * AT_WORD
    stop = min(block.hi - chunk, n)
    if start >= stop:
        return False
    fill_reals(shared.block_max, item, block.pitch, -INFINITY)
    if sees_all(block, chunk + start, chunk + stop):
        run.chunk = chunk
        run.start = start
        run.stop = stop
        run.kind = ALL
        score_some(job, block, shared, k, v, &run)
    else:
        build_words(job, block, shared, chunk, stop)
        while start < stop and shared.kinds[start // AT_WORD] == NONE:
            start += AT_WORD
        while start < stop and shared.kinds[(stop - 1) // AT_WORD] == NONE:
            stop = (stop - 1) // AT_WORD * AT_WORD
        if start >= stop:
            return False
        run.chunk = chunk
        run.start = start
        while run.start < stop:                 # words of one kind after the other
            run.kind = shared.kinds[run.start // AT_WORD]
            w = run.start // AT_WORD + 1
            while w * AT_WORD < stop and shared.kinds[w] == run.kind:
                w += 1
            if run.kind != ALL:
                block.excludes = True
            run.stop = min(w * AT_WORD, stop)
            score_some(job, block, shared, k, v, &run)
            run.start = w * AT_WORD
    first[0], end[0] = start, stop
    return True


cdef void weigh(const Job *job, Block *block, Shared *shared, Rows v, Py_ssize_t chunk, Py_ssize_t start,
                Py_ssize_t stop, bint careful) noexcept nogil:
    """Softmax and values of the keys chunk + start .. chunk + stop, whose scores are in shared.st. v: of the chunk."""
    cdef const at_tiles *tiles = job.tiles
    cdef Py_ssize_t item = <Py_ssize_t> tiles.itemsize, r
    cdef char *st = shared.st + start * block.pitch * item
    tiles.softmax[block.vectors - 1](st, stop - start, shared.block_max, block.m, block.l, shared.alpha, shared.beta)
    if job.total.data != NULL:
        tiles.add_totals(block.total, st, stop - start, shared.alpha, shared.beta, block.vectors)
    v.first += start * v.stride
    if careful:
        mark_excluded(job, block, shared, chunk, start, stop)
        tiles.values_marked(block.ot, st, v.first, v.stride, job.value_width, stop - start, shared.alpha, shared.beta,
                            block.first, block.vectors)
    else:
        tiles.values[block.vectors - 1](block.ot, st, v.first, v.stride, job.value_width, stop - start, shared.alpha,
                                        shared.beta, block.first)
    block.first = False
    if job.weights.data == NULL:
        return
    for r in range(block.pitch):
        set_real(block.maxima + (chunk // AT_CHUNK * block.pitch + r) * item, item,
                 real_at(shared.block_max + r * item, item))
    fill_reals(shared.unused, item, block.pitch, 1)
    move_rows(<const char **> block.weight_rows, block.n_rows, (chunk + start) * item)
    tiles.unpack(block.weight_rows, st, shared.unused, block.n_rows, block.vectors, stop - start)
    move_rows(<const char **> block.weight_rows, block.n_rows, -(chunk + start) * item)


# ---------------------------------------------------------------------------------------------------------------
# The end of a block
# ---------------------------------------------------------------------------------------------------------------
cdef inline bint sees_key(const Job *job, const Block *block, Py_ssize_t r, Py_ssize_t j) noexcept nogil:
    if job.filling:
        return True
    if j >= block.row_hi[r] or job.structure.kept <= j < block.row_lo[r]:
        return False
    if block.masked and block.mask_rows[r][j * job.mask.column] == 0:
        return False
    return job.bias.data == NULL or bias_at(job, block.bias_rows[r] + j * job.bias.column) != -INFINITY


cdef inline bint sees_all(const Block *block, Py_ssize_t first, Py_ssize_t end) noexcept nogil:
    """Whether every row sees the keys first .. end, so that there are no words for them."""
    return not block.masked and block.all_lo <= first and end <= block.all_hi


cdef void mark_excluded(const Job *job, Block *block, Shared *shared, Py_ssize_t chunk, Py_ssize_t start,
                        Py_ssize_t stop) noexcept nogil:
    """Weights of the keys chunk + start .. chunk + stop: -0.0 where a row may not see the key, for the marked tiles.

    A weight of 0 does not tell: a key that is seen and scores -inf has it too, and its 0 * NaN counts.
    """
    cdef Py_ssize_t item = <Py_ssize_t> job.tiles.itemsize, r, j
    cdef Py_ssize_t row_step = AT_CHUNK * item if job.few else item, key_step = item if job.few else block.pitch * item
    cdef char *weights = shared.st + start * key_step
    cdef const uint32_t *words = shared.words + start // AT_WORD * block.pitch
    if not sees_all(block, chunk + start, chunk + stop):
        if job.few:
            for r in range(block.n_rows):
                job.tiles.few_exclude(weights + r * row_step, words + r, block.pitch, stop - start, -0.0)
        else:
            job.tiles.exclude(weights, shared.unused, words, block.vectors, stop - start, -0.0)
    if job.bias.data == NULL:
        return
    for r in range(block.n_rows):
        for j in range(stop - start):
            if bias_at(job, block.bias_rows[r] + (chunk + start + j) * job.bias.column) == -INFINITY:
                set_real(weights + r * row_step + j * key_step, item, -0.0)


cdef bint sees_any_key(const Job *job, const Block *block, Py_ssize_t r) noexcept nogil:
    cdef Py_ssize_t j
    for j in range(0 if job.structure.kept > 0 else block.row_lo[r], block.row_hi[r]):
        if sees_key(job, block, r, j):
            return True
    return False


cdef void finish_weights(const Job *job, Block *block) noexcept nogil:
    """Weights were stored relative to the maximum of their chunk; the final factor of each chunk is known now."""
    cdef Py_ssize_t item = <Py_ssize_t> job.tiles.itemsize, r, c, j, at_row
    cdef double l
    for r in range(block.n_rows):
        at_row = r * item
        l = real_at(block.l + at_row, item)
        if l != l:                              # every key that the row sees has its part of the NaN, however small
            for j in range(job.keys):
                set_real(block.weight_rows[r] + j * item, item, NAN if sees_key(job, block, r, j) else 0)
            continue
        for c in range(block.lo // AT_CHUNK, chunks_before(block.hi)):
            job.tiles.rescale(block.weight_rows[r] + c * AT_CHUNK * item,
                              min(<Py_ssize_t> AT_CHUNK, job.keys - c * AT_CHUNK),
                              real_at(block.maxima + c * block.pitch * item + at_row, item),
                              real_at(block.m + at_row, item), l)


cdef void close_rows(const Job *job, Block *block, Shared *shared) noexcept nogil:
    """m and l if wanted, lse if wanted, sinks, and shared.alpha = 1 / l."""
    cdef Py_ssize_t item = <Py_ssize_t> job.tiles.itemsize, r
    for r in range(block.n_rows):
        if job.after.m.data != NULL:
            set_real(block.after.m[r], item, real_at(block.m + r * item, item))
        if job.after.l.data != NULL:
            set_real(block.after.l[r], item, real_at(block.l + r * item, item))
        if job.total.data != NULL:
            (<double *> block.total_rows[r])[0] = block.total[r]
        # l = 0: no key, or allowed ones that all score -inf; the softmax of the latter is NaN, not 0.
        if real_at(block.l + r * item, item) == 0 and sees_any_key(job, block, r):
            set_real(block.l + r * item, item, NAN)
        if job.lse.data != NULL:
            set_real(block.lse_rows[r], item,
                     (real_at(block.m + r * item, item) + at_log2(real_at(block.l + r * item, item))) * LN2)
        # A sink is one more term of the sum, without a value. Without a key it is the only one and l stays 0.
        if job.sinks != NULL and real_at(block.l + r * item, item) != 0:
            set_real(block.l + r * item, item, real_at(block.l + r * item, item)
                     + at_exp2(block.row_sink[r] - real_at(block.m + r * item, item)))
    job.tiles.reciprocal(shared.alpha, block.l, block.vectors)


cdef void close_block(const Job *job, Block *block, Shared *shared) noexcept nogil:
    """O / l to the caller's layout; lse, weights and the unfinished rows if wanted."""
    if block.first:                             # no row sees any key
        memset(block.ot, 0, block.pitch * job.value_width * job.tiles.itemsize)
    if job.after.o.data != NULL:
        fill_reals(shared.unused, job.tiles.itemsize, block.pitch, 1)
        job.tiles.unpack(block.after.o, block.ot, shared.unused, block.n_rows, block.vectors, job.value_width)
    close_rows(job, block, shared)
    if job.weights.data != NULL:
        finish_weights(job, block)
    if job.out.data != NULL:
        store_rows(job, block, shared)


cdef void visit_chunks(const Job *job, Block **blocks, Py_ssize_t n_blocks, Shared *shared, Py_ssize_t b,
                       Py_ssize_t head, bint careful) noexcept nogil:
    """The loop over key chunks, from the first to the last that some row of the blocks sees."""
    cdef Py_ssize_t lo = job.keys, hi = 0, x, c, start, stop
    cdef Visit visit
    cdef Rows k, v
    for x in range(n_blocks):
        start_rows(job, blocks[x])
        if job.weights.data != NULL:
            fill_reals(blocks[x].maxima, job.tiles.itemsize, chunks_before(job.keys) * blocks[x].pitch, -INFINITY)
        lo = min(lo, blocks[x].lo)
        hi = max(hi, blocks[x].hi)
    visit.b = b
    visit.head = head
    visit.first = lo // AT_CHUNK
    visit.end = chunks_before(hi)
    for c in range(visit.first, visit.end):
        visit.c = c
        k = bring_keys(job, shared, b, head, c, lo, hi)
        v.first = NULL
        for x in range(n_blocks):
            if c == visit.first:
                pack_rows(job, blocks[x], shared)
            look_ahead(job, blocks, n_blocks, x, shared, &visit)
            if score_chunk(job, blocks[x], shared, k, NULL, c * AT_CHUNK, &start, &stop):
                if v.first == NULL:             # after the first scores, which fetch what is read here
                    v = bring_values(job, shared, b, head, c, lo, hi)
                weigh(job, blocks[x], shared, v, c * AT_CHUNK, start, stop, careful)


cdef void attend_task(void *job_pointer, Py_ssize_t index, int slot) noexcept nogil:
    cdef const Job *job = <const Job *> job_pointer
    cdef Py_ssize_t heads = job.batch * job.kv_heads, place, head, b, start, x, n_blocks = 0
    cdef char *free_bytes = job.scratch + slot * job.scratch_per_slot
    cdef char *block_bytes
    cdef Shared *shared
    cdef Block *blocks[MAX_BLOCKS]
    if not job.structure.some:                  # tasks that follow each other share a head's keys
        head, place = index // job.tasks_per_head, index % job.tasks_per_head
    else:                                       # rows may differ in work, usually more to the end: heavy ones first
        head, place = index % heads, job.tasks_per_head - 1 - index // heads
    b = head // job.kv_heads
    head %= job.kv_heads
    shared = open_shared(job, &free_bytes)
    start = place * job.blocks_per_task * job.block_rows
    while n_blocks < job.blocks_per_task and start < job.group * job.queries:
        block_bytes = free_bytes + n_blocks * job.block_bytes
        blocks[n_blocks] = <Block *> take(&block_bytes, sizeof(Block))
        open_block(job, blocks[n_blocks], block_bytes, b, head, start)
        start += job.block_rows
        n_blocks += 1
    visit_chunks(job, blocks, n_blocks, shared, b, head, False)
    for x in range(n_blocks):
        # NaN here may be 0 * NaN or 0 * Inf from the value row of an excluded key: redo with those keys left out.
        if (not blocks[x].first and (blocks[x].excludes or job.bias.data != NULL) and not job.filling
                and job.tiles.any_nan(blocks[x].ot, blocks[x].vectors, job.value_width)):
            visit_chunks(job, &blocks[x], 1, shared, b, head, True)
        close_block(job, blocks[x], shared)


cdef int run_job(Job *job, int threads) except -1 nogil:
    """Divides the work, finds scratch for it, runs it."""
    cdef Py_ssize_t heads = job.batch * job.kv_heads, rows = job.group * job.queries, nbytes
    threads = divide(job, threads)
    # In floating point: a view may repeat one key 2^60 times.
    job.fetch = ((<double> rows * AT_SIZE_OF(job.q_format) + <double> job.keys * AT_SIZE_OF(job.k_format)) * heads
                 * (job.width + job.value_width) > (FEW_FETCH_BYTES if job.few else FETCH_BYTES))
    size_scratch(job)
    nbytes = threads * job.scratch_per_slot + heads * job.partials_per_head * job.partial_bytes
    job.scratch = <char *> scratch_of(nbytes)
    if not job.few:
        at_pool_run(attend_task, job, job.tasks, threads)
        return 0
    job.partials = job.scratch + threads * job.scratch_per_slot
    at_pool_run(together_task if job.together else few_task, job, job.tasks, threads)
    if job.splits > 1:                           # a few microseconds even for long caches
        at_pool_run(merge_task, job, heads, 1)
    return 0
