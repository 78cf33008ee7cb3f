# Few rows of queries (decoding): the same pass, the same order of operations, other tiles (kernels/few.inc).
#
#     for each task = (some heads of keys, or a split of the chunks of one)      one thread, own scratch
#         for each chunk of 256 keys that some row may see:
#             scores (the chunk's values are fetched meanwhile), changes, exclusion, softmax: one row after the other
#             values (the next chunk's keys are fetched meanwhile)
#             merge into m, l, o; or leave the chunk's maximum, sum and values to the end
#         o / l
#
# Such a call is a single reading of K and V, each row once for all query rows of the group, so it is bound by memory;
# what this file does is to keep reading while it computes. If there are fewer heads than the threads need, threads
# split the chunks of a head. To keep the bits, their results are then merged chunk by chunk from the left, as one
# thread does it. Where a token's heads lie side by side in memory, as projections leave them, a task takes a chunk for
# all heads before the next chunk, so that memory is read in order.
#
# Included by _core.pyx after _blocks.pxi and _pass.pxi, whose start_rows, score_chunk and close_rows it uses.

cdef struct ChunkRows:                          # what one chunk gives its rows
    char *block_max                             # [pitch] maximum of the scores
    char *sum                                   # [pitch] sum of the weights
    char *values                                # [row][few_pitch]
    double *total                               # [row] sum with more digits, if wanted


cdef void score_few(const Job *job, Block *block, Shared *shared, Rows k, const char *v,
                    const Run *run) noexcept nogil:
    """Final scores of a run of keys into shared.st[row][AT_CHUNK]."""
    cdef const at_tiles *tiles = job.tiles
    cdef Py_ssize_t item = <Py_ssize_t> tiles.itemsize, r
    cdef Py_ssize_t start = run.start, n = run.stop - run.start, key = run.chunk + run.start, column = 0
    cdef char *s = shared.st + start * item
    if run.kind == NONE:
        for r in range(block.n_rows):
            fill_reals(s + r * AT_CHUNK * item, item, n, -INFINITY)
        return
    tiles.few_scores[job.few_k_format](s, block.qt, block.n_rows, k.first + start * k.stride, k.stride,
                                       NULL if job.pages != NULL else shared.panels, job.width, n,
                                       v + start * job.v.row if job.fetch and not job.together else NULL, job.v.row)
    if job.bias.data != NULL:
        column = bring_bias(job, block, shared, key, n)
    for r in range(block.n_rows):
        if job.softcap != 0:
            tiles.softcap(s, shared.unused, 1, (n + tiles.lanes - 1) // tiles.lanes, -2 / job.softcap,
                          job.softcap * LOG2E)
        if job.bias.data != NULL:
            tiles.few_bias(s, shared.bias_rows[r], column, n)
        if job.slopes != NULL:
            tiles.few_alibi(s, real_at(block.slope + r * item, item), <double> (block.row_position[r] - key), n)
        if run.kind == MIXED:
            tiles.few_exclude(s, shared.words + start // AT_WORD * block.pitch + r, block.pitch, n, -INFINITY)
        s += AT_CHUNK * item


cdef inline ChunkRows own_rows(Shared *shared) noexcept nogil:
    cdef ChunkRows rows
    rows.block_max = shared.block_max
    rows.sum = shared.sum
    rows.values = shared.values
    rows.total = shared.total
    return rows


cdef inline ChunkRows chunk_rows_at(const Job *job, Py_ssize_t head, Py_ssize_t c, char **visited) noexcept nogil:
    """The place of chunk c of a head (counted over all items) among the partial results."""
    cdef ChunkRows rows
    cdef char *p = job.partials + (head * job.partials_per_head + c) * job.partial_bytes
    cdef Py_ssize_t reals = aligned(largest_pitch(job) * <Py_ssize_t> job.tiles.itemsize)
    visited[0] = p
    rows.block_max = p + AT_ALIGN
    rows.sum = rows.block_max + reals
    rows.total = <double *> (rows.sum + reals)
    rows.values = rows.sum + reals + aligned(largest_pitch(job) * <Py_ssize_t> sizeof(double))
    return rows


cdef inline Rows few_keys(const Job *job, Block *block, Shared *shared, const Visit *visit) noexcept nogil:
    """The keys of a chunk in the format few_k_format."""
    cdef Rows k
    if job.few_k_format != job.k_format:
        return bring_keys(job, shared, visit.b, visit.head, visit.c, block.lo, block.hi)
    k.first, k.stride = key_chunk(job, visit.b, visit.head, visit.c), job.k.row
    return k


cdef inline Rows few_values(const Job *job, Block *block, Shared *shared, const Visit *visit,
                            bint careful) noexcept nogil:
    """The values of a chunk in the format few_v_format; careful: in that of the tiles."""
    cdef Rows v
    if careful or job.few_v_format != job.v_format:
        return bring_values(job, shared, visit.b, visit.head, visit.c, block.lo, block.hi)
    v.first, v.stride = value_chunk(job, visit.b, visit.head, visit.c), job.v.row
    return v


cdef inline const char *keys_ahead(const Job *job, const Visit *visit) noexcept nogil:
    """Keys to fetch during the values of a chunk: the next chunk of this head, else the first one of the next head."""
    cdef Py_ssize_t head = visit.head, c = visit.c, end = visit.end
    if not job.fetch:
        return NULL
    if c + 1 == end and job.heads_per_task > 1 and head + 1 < job.kv_heads:
        head, c = head + 1, c + 1 - end
    elif c + 1 < end:
        c += 1
    else:
        return NULL
    return key_chunk(job, visit.b, head, c) if is_stored(job, visit.b, c) else NULL


cdef void weigh_few(const Job *job, Block *block, Shared *shared, ChunkRows rows, const Visit *visit, const Run *run,
                    bint careful) noexcept nogil:
    """Softmax and values of a run of keys, whose scores are in shared.st."""
    cdef const at_tiles *tiles = job.tiles
    cdef Py_ssize_t item = <Py_ssize_t> tiles.itemsize, r, n = run.stop - run.start
    cdef char *s = shared.st + run.start * item
    cdef Rows v = few_values(job, block, shared, visit, careful)
    cdef at_value_rows values
    v.first += run.start * v.stride
    for r in range(block.n_rows):
        set_real(rows.block_max + r * item, item, tiles.few_softmax(s + r * AT_CHUNK * item, n))
        if job.total.data != NULL:
            rows.total[r] = tiles.few_total(s + r * AT_CHUNK * item, n)
    if careful:
        mark_excluded(job, block, shared, run.chunk, run.start, run.stop)
        tiles.few_values_marked(rows.values, rows.sum, s, block.n_rows, v.first, v.stride, job.value_width, n)
        return
    values.rows, values.stride = v.first, v.stride
    values.keys = n
    if job.together:                            # later rows of its own, which no hardware foresees
        values.ahead, values.ahead_stride = v.first + AHEAD * v.stride, v.stride
    else:
        values.ahead, values.ahead_stride = keys_ahead(job, visit), job.k.row
    tiles.few_values[job.few_v_format](rows.values, rows.sum, s, block.n_rows, &values, job.value_width)


cdef void merge_chunk(const Job *job, Block *block, Shared *shared, ChunkRows rows) noexcept nogil:
    cdef Py_ssize_t item = <Py_ssize_t> job.tiles.itemsize, r, row = job.few_pitch * item
    job.tiles.few_merge(rows.block_max, rows.sum, block.m, block.l, shared.alpha, shared.beta, block.vectors)
    for r in range(block.n_rows if job.total.data != NULL else 0):
        block.total[r] = (real_at(shared.alpha + r * item, item) * block.total[r]
                          + real_at(shared.beta + r * item, item) * rows.total[r])
    if block.first:
        memcpy(block.ot, rows.values, block.n_rows * row)
    else:
        for r in range(block.n_rows):
            job.tiles.few_blend(block.ot + r * row, rows.values + r * row, job.few_pitch,
                                real_at(shared.alpha + r * item, item), real_at(shared.beta + r * item, item))
    block.first = False


cdef void visit_chunk(const Job *job, Block *block, Shared *shared, const Visit *visit, bint whole,
                      bint careful) noexcept nogil:
    """One chunk, into the block's rows if they are `whole`, else into partial results."""
    cdef Py_ssize_t b = visit.b, head = visit.head, c = visit.c
    cdef Rows k = few_keys(job, block, shared, visit)
    cdef Run run
    cdef char *visited
    cdef ChunkRows rows = own_rows(shared)
    cdef bint seen
    run.chunk = c * AT_CHUNK
    seen = score_chunk(job, block, shared, k, value_chunk(job, b, head, c), run.chunk, &run.start, &run.stop)
    if not whole:
        rows = chunk_rows_at(job, b * job.kv_heads + head, c, &visited)
        visited[0] = seen
        if seen:                                # for the lanes that are no rows: -inf and 0
            memcpy(rows.block_max, shared.block_max, block.pitch * job.tiles.itemsize)
            memcpy(rows.sum, shared.sum, block.pitch * job.tiles.itemsize)
    if seen:
        weigh_few(job, block, shared, rows, visit, &run, careful)
        if whole:
            merge_chunk(job, block, shared, rows)


cdef inline void find_chunks(Visit *visit, Py_ssize_t lo, Py_ssize_t hi, Py_ssize_t split,
                             Py_ssize_t splits) noexcept nogil:
    """visit.first .. visit.end: this part of the chunks with the keys lo .. hi."""
    cdef Py_ssize_t first = lo // AT_CHUNK, n = max(chunks_before(hi) - first, 0)
    visit.first = first + n * split // splits
    visit.end = first + n * (split + 1) // splits


cdef void visit_few(const Job *job, Block *block, Shared *shared, Py_ssize_t b, Py_ssize_t head, Py_ssize_t split,
                    bint careful) noexcept nogil:
    """The chunks that some row sees, or those of one split; careful: all of them, again."""
    cdef bint whole = job.splits == 1 or careful
    cdef Visit visit
    start_rows(job, block)
    pack_rows(job, block, shared)
    visit.b, visit.head = b, head
    find_chunks(&visit, block.lo, block.hi, 0 if whole else split, 1 if whole else job.splits)
    for visit.c in range(visit.first, visit.end):
        visit_chunk(job, block, shared, &visit, whole, careful)


cdef void close_few(const Job *job, Block *block, Shared *shared, Py_ssize_t b, Py_ssize_t head) noexcept nogil:
    """o / l to the caller's layout; lse if wanted."""
    cdef Py_ssize_t item = <Py_ssize_t> job.tiles.itemsize, r, row = job.few_pitch * item
    if block.first:                             # no row sees any key
        memset(block.ot, 0, block.n_rows * row)
    elif ((job.mask.data != NULL or job.structure.some or job.bias.data != NULL)
            and job.tiles.any_nan(block.ot, 1, block.n_rows * job.few_pitch // job.tiles.lanes)):
        # It may be 0 * NaN or 0 * Inf from the value row of an excluded key: redo with those keys left out.
        visit_few(job, block, shared, b, head, 0, True)
    if job.after.o.data != NULL:
        for r in range(block.n_rows):
            job.tiles.few_store(block.after.o[r], block.ot + r * row, job.value_width, 1)
    close_rows(job, block, shared)
    if job.out.data != NULL:
        store_rows(job, block, shared)


cdef void few_task(void *job_pointer, Py_ssize_t index, int slot) noexcept nogil:
    cdef const Job *job = <const Job *> job_pointer
    cdef char *free_bytes = job.scratch + slot * job.scratch_per_slot
    cdef Shared *shared = open_shared(job, &free_bytes)
    cdef Block *block = <Block *> take(&free_bytes, sizeof(Block))
    cdef Py_ssize_t head = index // job.splits * job.heads_per_task, b
    cdef Py_ssize_t end = min(head + job.heads_per_task, job.batch * job.kv_heads)
    for head in range(head, end):
        b = head // job.kv_heads
        open_block(job, block, free_bytes, b, head % job.kv_heads, 0)
        visit_few(job, block, shared, b, head % job.kv_heads, index % job.splits, False)
        if job.splits == 1:
            close_few(job, block, shared, b, head % job.kv_heads)


cdef void together_task(void *job_pointer, Py_ssize_t index, int slot) noexcept nogil:
    """Chunk after chunk of an item, or those of one split, each for all heads."""
    cdef const Job *job = <const Job *> job_pointer
    cdef char *free_bytes = job.scratch + slot * job.scratch_per_slot
    cdef Shared *shared = open_shared(job, &free_bytes)
    cdef char *block_bytes
    cdef Block *block
    cdef Py_ssize_t head, lo = job.keys, hi = 0
    cdef Visit visit
    visit.b = index // job.splits
    for head in range(job.kv_heads):
        block_bytes = free_bytes + head * job.block_bytes
        block = <Block *> take(&block_bytes, sizeof(Block))
        open_block(job, block, block_bytes, visit.b, head, 0)
        start_rows(job, block)
        pack_rows(job, block, shared)
        lo = min(lo, block.lo)
        hi = max(hi, block.hi)
    find_chunks(&visit, lo, hi, index % job.splits, job.splits)
    for visit.c in range(visit.first, visit.end):
        for visit.head in range(job.kv_heads):
            block = <Block *> (free_bytes + visit.head * job.block_bytes)
            visit_chunk(job, block, shared, &visit, job.splits == 1, False)
    if job.splits == 1:
        for head in range(job.kv_heads):
            close_few(job, <Block *> (free_bytes + head * job.block_bytes), shared, visit.b, head)


cdef void merge_task(void *job_pointer, Py_ssize_t head, int slot) noexcept nogil:
    """The partial results of one head, from the left."""
    cdef const Job *job = <const Job *> job_pointer
    cdef char *free_bytes = job.scratch + slot * job.scratch_per_slot
    cdef Shared *shared = open_shared(job, &free_bytes)
    cdef Block *block = <Block *> take(&free_bytes, sizeof(Block))
    cdef Py_ssize_t b = head // job.kv_heads, c
    cdef char *visited
    cdef ChunkRows there
    open_block(job, block, free_bytes, b, head % job.kv_heads, 0)
    start_rows(job, block)
    for c in range(block.lo // AT_CHUNK, chunks_before(block.hi)):
        there = chunk_rows_at(job, head, c, &visited)
        if visited[0]:
            merge_chunk(job, block, shared, there)
    close_few(job, block, shared, b, head % job.kv_heads)
