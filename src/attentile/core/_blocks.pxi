# The division of a job into tasks and blocks of rows, the scratch of a thread, and which keys the rows of a block may
# see. Included by _core.pyx after _job.pxi.

# ---------------------------------------------------------------------------------------------------------------
# Division of work and scratch
# ---------------------------------------------------------------------------------------------------------------
cdef bint is_small(const Job *job) noexcept nogil:
    """Whether a second thread would cost more than it gives."""
    cdef double heads = <double> job.batch * job.kv_heads
    cdef double k = <double> job.keys * job.width, v = <double> job.keys * job.value_width
    return (2 * heads * job.group * job.queries * (k + v) < SERIAL_FLOPS
            and heads * (k * AT_SIZE_OF(job.k_format) + v * AT_SIZE_OF(job.v_format)) < SERIAL_BYTES)


cdef int divide(Job *job, int threads) noexcept nogil:
    """Sets the block and task sizes and returns the number of threads that work.

    TASK_ROWS rows share a visit of a chunk unless threads would be short of tasks.
    """
    cdef Py_ssize_t rows = job.group * job.queries, heads = job.batch * job.kv_heads, blocks, share
    cdef bint apart
    if is_small(job):
        threads = 1
    job.block_rows = job.tiles.max_vectors * job.tiles.lanes
    choose_few(job, rows, heads, threads)
    if not job.few:
        blocks = (rows + job.block_rows - 1) // job.block_rows
        apart = lie_apart(job, &job.k, job.width, job.k_format) or lie_apart(job, &job.v, job.value_width, job.v_format)
        share = (TASK_ROWS + job.block_rows - 1) // job.block_rows
        share = MAX_BLOCKS if apart else min(<Py_ssize_t> MAX_BLOCKS, share)
        if threads > 1:
            share = max(<Py_ssize_t> 1, min(share, heads * blocks // (TASKS_PER_THREAD * threads)))
        job.tasks_per_head = (blocks + share - 1) // share
        job.blocks_per_task = (blocks + job.tasks_per_head - 1) // job.tasks_per_head
        job.k_apart = job.blocks_per_task >= GATHER_BLOCKS and lie_apart(job, &job.k, job.width, job.k_format)
        job.v_apart = job.blocks_per_task >= GATHER_BLOCKS and lie_apart(job, &job.v, job.value_width, job.v_format)
        job.tasks_per_head = (blocks + job.blocks_per_task - 1) // job.blocks_per_task
        job.tasks = heads * job.tasks_per_head
    return <int> min(<Py_ssize_t> threads, job.tasks)


cdef inline bint lie_apart(const Job *job, const Strided *rows, Py_ssize_t width, int format) noexcept nogil:
    """Rows with others between them, as those of a head where a token's heads lie side by side."""
    cdef Py_ssize_t step = rows.row if rows.row > 0 else -rows.row
    return job.pages == NULL and step >= max(<Py_ssize_t> APART_BYTES, 2 * width * AT_SIZE_OF(format))


cdef void choose_few(Job *job, Py_ssize_t rows, Py_ssize_t heads, int threads) noexcept nogil:
    """Whether the tiles for few rows are the faster ones, and how their work is divided.

    They take rows / lanes of the FMAs of a full vector, and transpose the keys besides, so they pay up to 3/4 of a
    vector; and they can share the keys of a head among threads, which pays for more rows if there are too few heads.
    """
    cdef Py_ssize_t tiled = (rows + job.block_rows - 1) // job.block_rows * heads, chunks = chunks_before(job.keys)
    cdef Py_ssize_t units
    job.few = (job.weights.data == NULL and not job.filling and rows <= AT_MAX_ROWS
               and (4 * rows <= 3 * job.tiles.lanes or (tiled < threads and chunks > 1)))
    if not job.few:
        return
    job.block_rows, job.blocks_per_task = rows, 1
    job.few_k_format = job.k_format if job.tiles.few_scores[job.k_format] != NULL else own_format(job)
    job.few_v_format = job.v_format if job.tiles.few_values[job.v_format] != NULL else own_format(job)
    job.few_pitch = (job.value_width + job.tiles.lanes - 1) // job.tiles.lanes * job.tiles.lanes
    job.together = (job.pages == NULL and 1 < job.kv_heads <= MAX_TOGETHER and 0 < job.k.head < job.k.row
                    and 0 < job.v.head < job.v.row)
    if job.together:                            # the heads of one item are a task's
        units, job.heads_per_task = job.batch, 1
        job.blocks_per_task = job.kv_heads
    else:
        units, job.heads_per_task = heads, max(<Py_ssize_t> 1, heads // (TASKS_PER_THREAD * threads))
    job.splits = 1
    if units < FEW_TASKS_PER_THREAD * threads and threads > 1 and chunks <= MAX_SPLITS // heads:
        job.splits = min(chunks, (FEW_TASKS_PER_THREAD * threads + units - 1) // units)
    job.tasks = (units + job.heads_per_task - 1) // job.heads_per_task * job.splits


cdef void size_scratch(Job *job) noexcept nogil:
    """The bytes are handed out by open_shared and open_block; partial results lie behind the slots."""
    cdef Py_ssize_t item = <Py_ssize_t> job.tiles.itemsize, rows = largest_pitch(job)
    cdef Py_ssize_t chunks = chunks_before(job.keys) if job.weights.data != NULL else 0
    cdef Py_ssize_t values = aligned(max(rows * job.value_width, job.block_rows * job.few_pitch) * item)
    job.block_bytes = (aligned(sizeof(Block)) + aligned(rows * job.width * item) + values
                       + (ROW_BUFFERS + chunks) * aligned(rows * item) + aligned(rows * sizeof(double)))
    job.scratch_per_slot = (aligned(sizeof(Shared)) + aligned(AT_CHUNK * rows * item) + 4 * aligned(rows * item)
                            + aligned(WORDS * rows * sizeof(uint32_t)) + job.blocks_per_task * job.block_bytes)
    if converts_bias(job):
        job.scratch_per_slot += aligned(AT_CHUNK * rows * item)
    if brings_keys(job):
        job.scratch_per_slot += aligned(AT_CHUNK * job.width * item)
    if brings_values(job):
        job.scratch_per_slot += aligned(AT_CHUNK * job.value_width * item)
    if widens_rows(job):
        job.scratch_per_slot += aligned(rows * max(job.width, job.value_width) * item)
    if job.few:
        job.scratch_per_slot += (aligned(AT_FEW_KEYS * job.width * item) + aligned(rows * item)
                                 + aligned(job.block_rows * job.few_pitch * item) + aligned(rows * sizeof(double)))
        job.partial_bytes = (AT_ALIGN + 2 * aligned(rows * item) + aligned(job.block_rows * job.few_pitch * item)
                             + aligned(rows * sizeof(double)))
        job.partials_per_head = chunks_before(job.keys) if job.splits > 1 else 0


cdef inline Py_ssize_t largest_pitch(const Job *job) noexcept nogil:
    """Rows of the largest block, in whole vectors."""
    cdef Py_ssize_t rows = min(job.block_rows, job.group * job.queries)
    return (rows + job.tiles.lanes - 1) // job.tiles.lanes * job.tiles.lanes


cdef void *scratch_of(Py_ssize_t nbytes) except NULL nogil:
    """This thread's scratch of at least so many bytes, kept for later calls."""
    cdef void *scratch = at_scratch(nbytes)
    if scratch == NULL:
        with gil:
            raise MemoryError(f"attentile: no memory for {nbytes} bytes of scratch")
    return scratch


cdef inline char *take(char **free_bytes, Py_ssize_t nbytes) noexcept nogil:
    cdef char *p = free_bytes[0]
    free_bytes[0] = p + aligned(nbytes)
    return p


# ---------------------------------------------------------------------------------------------------------------
# A block: which rows, which keys they may see
# ---------------------------------------------------------------------------------------------------------------
cdef void point_rows(const Job *job, const char **rows, const Strided *array, Py_ssize_t b, Py_ssize_t head,
                     Py_ssize_t i, Py_ssize_t n) noexcept nogil:
    """rows[r] = row r of the block in this array: query i + r of the head, running on into the next heads."""
    cdef Py_ssize_t r
    cdef const char *p
    if array.data == NULL:
        return
    p = at(array, b, head, i)
    for r in range(n):
        rows[r] = p
        p += array.row
        i += 1
        if i == job.queries:
            head, i = head + 1, 0
            p = at(array, b, head, 0)


cdef inline Py_ssize_t integer_of(const Index *index, Py_ssize_t b, Py_ssize_t otherwise) noexcept nogil:
    return (<const Py_ssize_t *> (index.data + b * index.batch))[0] if index.data != NULL else otherwise


cdef Item item_of(const Job *job, Py_ssize_t b) noexcept nogil:
    cdef const Structure *structure = &job.structure
    cdef Item item
    item.length = integer_of(&structure.lengths, b, job.keys)
    item.prefix = integer_of(&structure.prefixes, b, 0)
    item.first = integer_of(&structure.first, b, item.length - job.queries if structure.from_end else 0)
    item.first = min(max(item.first, -FAR), FAR)
    return item


cdef inline void interval_of(const Job *job, const Item *item, Py_ssize_t b, Py_ssize_t i, Py_ssize_t *lo,
                             Py_ssize_t *hi) noexcept nogil:
    """The keys lo <= j < hi that query i of an item may see; 0 <= lo, hi <= keys."""
    cdef const Structure *structure = &job.structure
    cdef Py_ssize_t position = item.first + i
    lo[0] = 0
    hi[0] = item.length
    if structure.causal:
        hi[0] = min(hi[0], max(position + 1, item.prefix))
    if structure.right < FAR:
        hi[0] = min(hi[0], position + structure.right + 1)
    if structure.left < FAR:
        lo[0] = max(position - structure.left, 0)
    if structure.lo.data != NULL:
        lo[0] = max(lo[0], (<const Py_ssize_t *> at(&structure.lo, b, 0, i))[0])
        hi[0] = min(hi[0], (<const Py_ssize_t *> at(&structure.hi, b, 0, i))[0])
    lo[0] = min(lo[0], job.keys)
    hi[0] = min(max(hi[0], 0), job.keys)


cdef void find_intervals(const Job *job, Block *block, Py_ssize_t b, Py_ssize_t i) noexcept nogil:
    """Which keys the rows may see by their position: each, any and all of them. i: query of row 0."""
    cdef Py_ssize_t r, kept = job.structure.kept, run_lo = 0, run_hi = job.keys
    cdef Item item
    cdef bint some_kept = False
    block.masked = job.mask.data != NULL
    if job.structure.mask_in_rows:
        block.masked = not at_mask_run(block.mask_rows[0], job.mask.column, job.keys, &run_lo, &run_hi)
    block.lo, block.hi = 0, job.keys
    block.all_lo, block.all_hi = run_lo, run_hi
    if not job.structure.some and run_lo == 0 and run_hi == job.keys:
        for r in range(block.n_rows):
            block.row_lo[r] = 0
            block.row_hi[r] = job.keys
        return
    block.lo, block.hi = job.keys, 0
    item = item_of(job, b)
    for r in range(block.n_rows):
        interval_of(job, &item, b, i, &block.row_lo[r], &block.row_hi[r])
        block.row_lo[r] = max(block.row_lo[r], run_lo)
        block.row_hi[r] = min(block.row_hi[r], run_hi)
        block.all_lo = max(block.all_lo, block.row_lo[r])
        block.all_hi = min(block.all_hi, block.row_hi[r])
        if block.row_lo[r] < block.row_hi[r]:
            block.lo = min(block.lo, block.row_lo[r])
            block.hi = max(block.hi, block.row_hi[r])
        if kept > 0 and block.row_hi[r] > 0:
            block.hi = max(block.hi, min(kept, block.row_hi[r]))
            some_kept = True
        i = i + 1 if i + 1 < job.queries else 0
    block.gap_end = block.lo
    if some_kept:
        block.lo = 0
    if job.filling:                             # masked keys take part, with another score
        block.lo, block.hi = 0, job.keys


cdef void point_partial(const Job *job, PartialRows *rows, const Partial *partial, Py_ssize_t b, Py_ssize_t head,
                        Py_ssize_t i, Py_ssize_t n) noexcept nogil:
    point_rows(job, <const char **> rows.m, &partial.m, b, head, i, n)
    point_rows(job, <const char **> rows.l, &partial.l, b, head, i, n)
    point_rows(job, <const char **> rows.o, &partial.o, b, head, i, n)


cdef void open_block(const Job *job, Block *block, char *free_bytes, Py_ssize_t b, Py_ssize_t kv_head,
                     Py_ssize_t start) noexcept nogil:
    """Rows start .. start + n_rows of key head kv_head: buffers, pointers, intervals."""
    cdef Py_ssize_t item = <Py_ssize_t> job.tiles.itemsize, head, i
    block.n_rows = min(job.block_rows, job.group * job.queries - start)
    block.vectors = <int> ((block.n_rows + job.tiles.lanes - 1) // job.tiles.lanes)
    block.pitch = block.vectors * job.tiles.lanes
    block.qt = take(&free_bytes, block.pitch * job.width * item)
    block.ot = take(&free_bytes, max(block.pitch * job.value_width, block.n_rows * job.few_pitch) * item)
    block.m = take(&free_bytes, block.pitch * item)
    block.l = take(&free_bytes, block.pitch * item)
    block.slope = take(&free_bytes, block.pitch * item)
    block.position = take(&free_bytes, block.pitch * item)
    block.total = <double *> take(&free_bytes, block.pitch * sizeof(double))
    block.maxima = free_bytes
    head, i = kv_head * job.group + start // job.queries, start % job.queries
    point_rows(job, block.q_rows, &job.q, b, head, i, block.n_rows)
    point_rows(job, <const char **> block.out_rows, &job.out, b, head, i, block.n_rows)
    point_rows(job, block.mask_rows, &job.mask, b, head, i, block.n_rows)
    point_rows(job, block.bias_rows, &job.bias, b, head, i, block.n_rows)
    point_rows(job, <const char **> block.weight_rows, &job.weights, b, head, i, block.n_rows)
    point_rows(job, <const char **> block.lse_rows, &job.lse, b, head, i, block.n_rows)
    point_rows(job, <const char **> block.total_rows, &job.total, b, head, i, block.n_rows)
    point_partial(job, &block.before, &job.before, b, head, i, block.n_rows)
    point_partial(job, &block.after, &job.after, b, head, i, block.n_rows)
    find_intervals(job, block, b, i)
    find_head_scalars(job, block, b, head, i)


cdef void start_rows(const Job *job, Block *block) noexcept nogil:
    """No key seen yet: m = -inf, l = 0, and ot is written by the first chunk. Or where other keys have left them."""
    cdef Py_ssize_t r, item = <Py_ssize_t> job.tiles.itemsize
    block.first = True
    block.excludes = False
    fill_reals(block.m, item, block.pitch, -INFINITY)
    fill_reals(block.l, item, block.pitch, 0)
    memset(block.total, 0, block.pitch * sizeof(double))
    if job.before.m.data == NULL:
        return
    block.first = False
    for r in range(block.n_rows):
        set_real(block.m + r * item, item, real_at(block.before.m[r], item))
        set_real(block.l + r * item, item, real_at(block.before.l[r], item))
    if job.few:
        memset(block.ot, 0, block.n_rows * job.few_pitch * item)
        for r in range(block.n_rows):
            memcpy(block.ot + r * job.few_pitch * item, block.before.o[r], job.value_width * item)
    else:
        job.tiles.pack(block.ot, <const char **> block.before.o, block.n_rows, block.vectors, job.value_width, 1)


cdef inline uint32_t interval_word(Py_ssize_t lo, Py_ssize_t hi) noexcept nogil:
    """Bits lo .. hi - 1, both relative to the word."""
    lo = min(max(lo, 0), AT_WORD)
    hi = min(max(hi, lo), AT_WORD)
    return <uint32_t> ((1ULL << hi) - (1ULL << lo))


cdef inline void move_rows(const char **rows, Py_ssize_t n, Py_ssize_t offset) noexcept nogil:
    cdef Py_ssize_t r
    for r in range(n):
        rows[r] += offset


cdef void build_words(const Job *job, Block *block, Shared *shared, Py_ssize_t chunk, Py_ssize_t n) noexcept nogil:
    """Words and their kinds for the keys chunk .. chunk + n. Lanes beyond n_rows get 0 and do not count."""
    cdef Py_ssize_t w, r, key, words = (n + AT_WORD - 1) // AT_WORD
    cdef uint32_t some, every, full, word
    cdef bint within                            # no row's interval ends in this word
    cdef uint32_t *row
    if block.masked:
        move_rows(block.mask_rows, block.n_rows, chunk * job.mask.column)
        at_mask_words(shared.words, block.mask_rows, job.mask.column, block.n_rows, block.pitch, n)
        move_rows(block.mask_rows, block.n_rows, -chunk * job.mask.column)
    for w in range(words):
        row = shared.words + w * block.pitch
        key = chunk + w * AT_WORD
        within = block.all_lo <= key and min(key + AT_WORD, chunk + n) <= block.all_hi
        full = interval_word(0, n - w * AT_WORD)
        some, every = 0, full
        for r in range(block.n_rows):
            word = row[r] if block.masked else full
            if not within:
                word &= (interval_word(block.row_lo[r] - key, block.row_hi[r] - key)
                         | interval_word(0, min(job.structure.kept, block.row_hi[r]) - key))
            row[r] = word
            some |= word
            every &= word
        memset(row + block.n_rows, 0, (block.pitch - block.n_rows) * sizeof(uint32_t))
        shared.kinds[w] = ALL if every == full else (MIXED if some or job.filling else NONE)


cdef Shared *open_shared(const Job *job, char **free_bytes) noexcept nogil:
    """What the blocks of a task share, from the start of the slot's scratch."""
    cdef Py_ssize_t item = <Py_ssize_t> job.tiles.itemsize, rows = largest_pitch(job)
    cdef Shared *shared = <Shared *> take(free_bytes, sizeof(Shared))
    shared.st = take(free_bytes, AT_CHUNK * rows * item)
    shared.block_max = take(free_bytes, rows * item)
    shared.unused = take(free_bytes, rows * item)
    shared.alpha = take(free_bytes, rows * item)
    shared.beta = take(free_bytes, rows * item)
    shared.words = <uint32_t *> take(free_bytes, WORDS * rows * sizeof(uint32_t))
    shared.capped = NULL
    fill_reals(shared.unused, item, rows, 0)
    if brings_keys(job):
        shared.keys = take(free_bytes, AT_CHUNK * job.width * item)
    if brings_values(job):
        shared.wide_values = take(free_bytes, AT_CHUNK * job.value_width * item)
    if widens_rows(job):
        shared.rows = take(free_bytes, rows * max(job.width, job.value_width) * item)
    if converts_bias(job):
        shared.bias = take(free_bytes, AT_CHUNK * rows * item)
    if job.few:
        shared.panels = take(free_bytes, AT_FEW_KEYS * job.width * item)
        shared.sum = take(free_bytes, rows * item)
        shared.total = <double *> take(free_bytes, rows * sizeof(double))
        shared.values = take(free_bytes, job.block_rows * job.few_pitch * item)
        fill_reals(shared.sum, item, rows, 0)       # lanes that are no rows
    return shared
