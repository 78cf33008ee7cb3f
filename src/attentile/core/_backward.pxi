# The gradients of attention: five products in one pass over cells of 192 queries and 256 keys.
#
#     for each task = (batch b, key head h, query head of its group, chunk of AT_ROW_CHUNK queries)
#         pack      the blocks of Q and dO; delta, the row sums of dO * O                  once
#         for each chunk of 256 keys:
#             for each block of query rows:
#                 S, dP           the tile of the scores, with K and Q, V and dO
#                 P, dS           in their places
#                 dq              the tile of the values, with K in place of V
#             dk, dv              after the tasks before: the one new product, whose lanes are columns and whose chain
#                                 is the rows of all blocks
#         unpack    dq
#
# P and dS of a cell (2 x 192 x 256 floats: 384 KiB) stay in L2. The memory beside the gradients is that of a task.
#
# The tasks of a head share its dk and dv, and with a bias that is repeated all tasks share its gradient. Each element
# has one order of additions all the same: task after task. So a task that has finished a cell waits until the one
# before it has passed this chunk of keys. Tasks start at the first chunk, so each follows a cell behind the one before;
# and some heads are at work at once where there are several. So threads hardly ever wait. Tasks are handed out in an
# order in which none comes before one that it waits for.
#
# Order of operations: kernels/kernels.h, BACKWARD. Included by _core.pyx after _backward_job.pxi.

# ---------------------------------------------------------------------------------------------------------------
# A cell
# ---------------------------------------------------------------------------------------------------------------
cdef bint is_chunk_finite(const Job *job, const Rows *rows, Py_ssize_t n, Py_ssize_t width) noexcept nogil:
    cdef const char *some[AT_MAX_ROWS]
    cdef Py_ssize_t j = 0, x, count
    while j < n:
        count = min(<Py_ssize_t> AT_MAX_ROWS, n - j)
        for x in range(count):
            some[x] = rows.first + (j + x) * rows.stride
        if not job.tiles.all_finite(some, count, width):
            return False
        j += count
    return True


cdef void add_score_gradients(const Backward *back, Cell *cell, RowGradients *block, Py_ssize_t i) noexcept nogil:
    """What comes of dS itself: the gradients of the bias and of ALiBi's slopes. i: query of row 0."""
    cdef const Job *job = back.job
    cdef Block *rows = block.rows
    cdef Py_ssize_t item = <Py_ssize_t> job.tiles.itemsize, r, n = block.stop - block.start
    cdef Py_ssize_t key = cell.c * AT_CHUNK + block.start
    cdef char *ds = block.ds + block.start * rows.pitch * item
    cdef double sums[AT_MAX_ROWS]
    cdef char *lines[AT_MAX_ROWS]
    if back.dslopes != NULL:
        memset(sums, 0, sizeof(sums))
        place_rows(job, rows, key)
        job.tiles.add_distances(sums, ds, rows.position, rows.n_rows, rows.vectors, n)
        for r in range(rows.n_rows):
            cell.distances += sums[r]
    if back.dbias.data != NULL:
        for r in range(rows.n_rows):
            lines[r] = cell.line + r * AT_CHUNK * item
        job.tiles.unpack(lines, ds, cell.ones, rows.n_rows, rows.vectors, n)
        for r in range(rows.n_rows):
            if back.by_row:
                block.bias_sums[r] += job.tiles.few_total(lines[r], n)
            else:
                job.tiles.add_row(at(&back.dbias, cell.b, cell.head, i + r) + key * back.dbias.column,
                                  back.dbias.column, lines[r], n)


cdef void add_bias_sums(const Backward *back, const Cell *cell) noexcept nogil:
    """Those of the rows of a task, after the tasks before."""
    cdef Py_ssize_t item = <Py_ssize_t> back.job.tiles.itemsize, x, r
    cdef char *to
    if cell.task > 0:
        at_await(&back.passed[cell.task - 1], PASSED_ALL)
    for x in range(cell.n_blocks):
        for r in range(cell.blocks[x].rows.n_rows):
            to = at(&back.dbias, cell.b, cell.head, cell.i + x * back.job.block_rows + r)
            set_real(to, item, real_at(to, item) + cell.blocks[x].bias_sums[r])


cdef bint is_careful(const Backward *back, const Cell *cell) noexcept nogil:
    """Whether a pair is excluded and an operand of its products is not finite."""
    cdef const Job *job = back.job
    cdef Py_ssize_t x, first = AT_CHUNK, end = 0
    cdef bint finite = True
    cdef Rows k
    for x in range(cell.n_blocks):
        if cell.blocks[x].excludes and cell.blocks[x].start < cell.blocks[x].stop:
            finite = finite and cell.blocks[x].finite
            first = min(first, cell.blocks[x].start)
            end = max(end, cell.blocks[x].stop)
    if first >= end:
        return False
    k.first, k.stride = cell.k.first + first * cell.k.stride, cell.k.stride
    return not (finite and is_chunk_finite(job, &k, end - first, job.width))


cdef void weigh_block(const Backward *back, Cell *cell, Shared *shared, RowGradients *block,
                      Py_ssize_t i) noexcept nogil:
    """P and dS of a block and the chunk; i: query of row 0."""
    cdef const Job *job = back.job
    cdef const at_tiles *tiles = job.tiles
    cdef Block *rows = block.rows
    cdef Py_ssize_t n, offset
    shared.st = block.p
    rows.excludes = False
    if not score_chunk(job, rows, shared, cell.k, NULL, cell.c * AT_CHUNK, &block.start, &block.stop):
        block.start = block.stop = 0
        return
    block.excludes = rows.excludes or job.bias.data != NULL
    n = block.stop - block.start
    offset = block.start * rows.pitch * <Py_ssize_t> tiles.itemsize
    tiles.scores[rows.vectors - 1](block.ds + offset, shared.unused, block.dout_t,
                                   cell.v.first + block.start * cell.v.stride, cell.v.stride, 1, job.value_width, n,
                                   NULL, 0)
    tiles.weigh(block.p + offset, block.ds + offset, &block.numbers, rows.vectors, n)
    add_score_gradients(back, cell, block, i)
    if job.softcap != 0:
        tiles.uncap(block.ds + offset, shared.capped + offset, rows.vectors, n, job.softcap * LOG2E)


cdef void add_dq(const Backward *back, const Cell *cell, RowGradients *block) noexcept nogil:
    cdef const Job *job = back.job
    cdef Block *rows = block.rows
    cdef Py_ssize_t n = block.stop - block.start
    cdef char *ds = block.ds + block.start * rows.pitch * <Py_ssize_t> job.tiles.itemsize
    cdef const char *k = cell.k.first + block.start * cell.k.stride
    if back.dq.data == NULL or n == 0:
        return
    if cell.careful:
        job.tiles.mark_zeros(ds, rows.vectors, n)
        job.tiles.values_marked(block.dq_t, ds, k, cell.k.stride, job.width, n, cell.ones, cell.ones, block.first,
                                rows.vectors)
    else:
        job.tiles.values[rows.vectors - 1](block.dq_t, ds, k, cell.k.stride, job.width, n, cell.ones, cell.ones,
                                           block.first)
    block.first = False


cdef Py_ssize_t find_parts(const Cell *cell, Py_ssize_t key, Py_ssize_t end, bint of_dk, Py_ssize_t item,
                           at_outer_rows *parts, int *n_parts) noexcept nogil:
    """The blocks that have something for this key of the chunk; how far the same ones have."""
    cdef Py_ssize_t x
    cdef RowGradients *block
    n_parts[0] = 0
    for x in range(cell.n_blocks):
        block = cell.blocks[x]
        if block.start <= key < block.stop:
            parts[n_parts[0]].a = (block.ds if of_dk else block.p) + key * block.rows.pitch * item
            parts[n_parts[0]].rows = &block.q_rows[0] if of_dk else &block.dout_rows[0]
            parts[n_parts[0]].n_rows, parts[n_parts[0]].pitch = block.rows.n_rows, block.rows.pitch
            n_parts[0] += 1
            end = min(end, block.stop)
        elif key < block.start < block.stop:
            end = min(end, block.start)
    return end


cdef void add_to_head(const Backward *back, const Cell *cell, const Strided *array, int format,
                      bint of_dk) noexcept nogil:
    """The cell's part of dk or dv."""
    cdef const Job *job = back.job
    cdef Py_ssize_t item = <Py_ssize_t> job.tiles.itemsize, first = cell.c * AT_CHUNK, n = chunk_keys(job, cell.c)
    cdef Py_ssize_t width = job.width if of_dk else job.value_width, j = 0, end, x
    cdef bint apart = is_summed_apart(job, array, format)
    cdef at_outer_rows parts[MAX_BACKWARD_BLOCKS]
    cdef int n_parts
    cdef at_sums to
    cdef char *sums
    if array.data == NULL:
        return
    sums, to.stride = at(array, cell.b, cell.kv_head, first), array.row
    if apart:
        to.stride = width * item
        sums = back.sums + cell.unit % back.n_sums * back.sums_bytes + first * to.stride
        if not of_dk:
            sums += aligned(job.keys * job.width * item)
    to.factor = back.scale if of_dk else 1
    to.first = cell.place == 0
    while j < n:
        to.rows = sums + j * to.stride
        end = find_parts(cell, j, n, of_dk, item, parts, &n_parts)
        if n_parts > 0:
            job.tiles.add_outer(&to, parts, n_parts, width, end - j, cell.careful)
        elif to.first:
            for x in range(end - j):
                memset(to.rows + x * to.stride, 0, width * item)
        j = end
    if apart and cell.place == back.tasks_per_unit - 1:
        for x in range(n):
            job.tiles.narrow(at(array, cell.b, cell.kv_head, first + x), sums + x * to.stride, width, format)


cdef inline void wait_for_turn(const Backward *back, const Cell *cell) noexcept nogil:
    """Until the task before, and with it all others before, has passed this chunk."""
    if cell.place > 0 or (back.in_turn and cell.task > 0):
        at_await(&back.passed[cell.task - 1], cell.c + 1)


cdef void pass_chunk(const Backward *back, Cell *cell, Shared *shared) noexcept nogil:
    """The cell at chunk cell.c, if some row sees a key of it; then the chunk is the next task's."""
    cdef const Job *job = back.job
    cdef Py_ssize_t x
    if back.in_turn:
        wait_for_turn(back, cell)
    for x in range(cell.n_blocks):
        cell.blocks[x].start = cell.blocks[x].stop = 0
    cell.careful = False
    if cell.lo < (cell.c + 1) * AT_CHUNK and cell.hi > cell.c * AT_CHUNK:
        cell.k = bring_keys(job, shared, cell.b, cell.kv_head, cell.c, cell.lo, cell.hi)
        cell.v = bring_values(job, shared, cell.b, cell.kv_head, cell.c, cell.lo, cell.hi)
        for x in range(cell.n_blocks):
            weigh_block(back, cell, shared, cell.blocks[x], cell.i + x * job.block_rows)
        cell.careful = is_careful(back, cell)
        for x in range(cell.n_blocks):
            add_dq(back, cell, cell.blocks[x])
    wait_for_turn(back, cell)
    add_to_head(back, cell, &back.dk, back.dk_format, True)
    add_to_head(back, cell, &back.dv, back.dv_format, False)
    at_pass(&back.passed[cell.task], cell.c + 1)


cdef void open_blocks(const Backward *back, Cell *cell, char *free_bytes) noexcept nogil:
    """The rows of the task."""
    cdef const Job *job = back.job
    cdef RowGradients *block
    cdef char *block_bytes
    cdef Py_ssize_t i = cell.i
    cell.n_blocks = 0
    cell.lo, cell.hi = job.keys, 0
    while i < min(cell.i + AT_ROW_CHUNK, job.queries):
        block_bytes = free_bytes + cell.n_blocks * back.block_bytes
        block = <RowGradients *> take(&block_bytes, sizeof(RowGradients))
        open_row_gradients(back, cell, block, block_bytes, i)
        cell.lo = min(cell.lo, block.rows.lo)
        cell.hi = max(cell.hi, block.rows.hi)
        cell.blocks[cell.n_blocks] = block
        cell.n_blocks += 1
        i += job.block_rows


cdef inline void place_task(const Backward *back, Cell *cell, Py_ssize_t index) noexcept nogil:
    """The task with this index: the first ones of some units, then their second ones, and so on; then more units."""
    cdef Py_ssize_t first = index // (back.together * back.tasks_per_unit) * back.together
    cdef Py_ssize_t units = min(back.together, back.job.batch * back.job.kv_heads - first)
    index -= first * back.tasks_per_unit
    cell.place = index // units
    cell.unit = first + index % units
    cell.task = cell.unit * back.tasks_per_unit + cell.place


cdef void backward_task(void *back_pointer, Py_ssize_t index, int slot) noexcept nogil:
    cdef const Backward *back = <const Backward *> back_pointer
    cdef const Job *job = back.job
    cdef char *free_bytes = job.scratch + slot * job.scratch_per_slot
    cdef Shared *shared = open_shared(job, &free_bytes)
    cdef Cell *cell = open_cell(back, &free_bytes)
    cdef Py_ssize_t x
    shared.n_ahead = 0
    if job.softcap != 0:
        shared.capped = take(&free_bytes, AT_CHUNK * largest_pitch(job) * <Py_ssize_t> job.tiles.itemsize)
    place_task(back, cell, index)
    cell.b, cell.kv_head = cell.unit // job.kv_heads, cell.unit % job.kv_heads
    cell.head = cell.kv_head * job.group + cell.place // back.row_chunks
    cell.i = cell.place % back.row_chunks * AT_ROW_CHUNK
    cell.distances = 0
    if cell.place == 0 and back.sums != NULL and cell.unit >= back.n_sums:      # the sums of an earlier unit
        at_await(&back.passed[(cell.unit - back.n_sums + 1) * back.tasks_per_unit - 1], PASSED_ALL)
    open_blocks(back, cell, free_bytes)
    for cell.c in range(chunks_before(job.keys)):
        pass_chunk(back, cell, shared)
    if back.by_row:
        add_bias_sums(back, cell)
    at_pass(&back.passed[cell.task], PASSED_ALL)
    for x in range(cell.n_blocks):
        store_dq(back, cell, shared, cell.blocks[x], cell.i + x * job.block_rows)
    back.distances[cell.task] = cell.distances


# ---------------------------------------------------------------------------------------------------------------
# The run
# ---------------------------------------------------------------------------------------------------------------
cdef int divide_backward(Backward *back, int threads) noexcept nogil:
    """Sets the tasks and returns the number of threads that work."""
    cdef Job *job = back.job
    cdef const Strided *bias = &back.dbias
    back.row_chunks = (job.queries + AT_ROW_CHUNK - 1) // AT_ROW_CHUNK
    back.tasks_per_unit = back.row_chunks * job.group
    job.tasks = job.batch * job.kv_heads * back.tasks_per_unit
    job.block_rows = job.tiles.max_vectors * job.tiles.lanes
    job.blocks_per_task = AT_ROW_CHUNK // job.block_rows
    job.k_apart = lie_apart(job, &job.k, job.width, job.k_format)
    job.v_apart = lie_apart(job, &job.v, job.value_width, job.v_format)
    back.by_row = bias.data != NULL and bias.column == 0
    back.in_turn = not back.by_row and bias.data != NULL and (
        (bias.row == 0 and job.queries > 1) or (bias.batch == 0 and job.batch > 1)
        or (bias.head == 0 and job.kv_heads * job.group > 1))
    threads = 1 if is_small(job) else <int> min(<Py_ssize_t> threads, job.tasks)
    back.together = 1
    if threads > 1 and not back.in_turn and not back.by_row:
        back.together = min(<Py_ssize_t> UNITS_PER_THREAD * threads, job.batch * job.kv_heads)
    return threads


cdef int run_backward(void *back_pointer, int threads) except -1 nogil:
    """Divides the work, finds scratch for it, runs it."""
    cdef Backward *back = <Backward *> back_pointer
    cdef Job *job = back.job
    cdef Py_ssize_t x, nbytes, item = <Py_ssize_t> job.tiles.itemsize, head
    threads = divide_backward(back, threads)
    size_scratch(job)
    back.block_bytes = row_gradient_bytes(back)
    job.scratch_per_slot += cell_bytes(back) + job.blocks_per_task * (back.block_bytes - job.block_bytes)
    back.n_sums = min(2 * max(back.together, <Py_ssize_t> threads), job.batch * job.kv_heads)
    back.sums_bytes = 0
    if is_summed_apart(job, &back.dk, back.dk_format) or is_summed_apart(job, &back.dv, back.dv_format):
        back.sums_bytes = aligned(job.keys * job.width * item) + aligned(job.keys * job.value_width * item)
    nbytes = threads * job.scratch_per_slot
    job.scratch = <char *> scratch_of(nbytes + 2 * aligned(job.tasks * <Py_ssize_t> sizeof(double))
                                      + back.n_sums * back.sums_bytes)
    back.passed = <int64_t *> (job.scratch + nbytes)
    back.distances = <double *> (job.scratch + nbytes + aligned(job.tasks * <Py_ssize_t> sizeof(double)))
    back.sums = NULL
    if back.sums_bytes > 0:
        back.sums = job.scratch + nbytes + 2 * aligned(job.tasks * <Py_ssize_t> sizeof(double))
    memset(back.passed, 0, job.tasks * sizeof(int64_t))
    at_pool_run(backward_task, back, job.tasks, threads)
    if back.dslopes != NULL:
        for x in range(job.tasks):
            head = x // back.row_chunks % (job.kv_heads * job.group)
            back.dslopes[head] -= back.distances[x]
    return 0
