# The gradients of attention: five products in one pass over cells of 192 queries and 256 keys.
#
#     for each task = (batch b, key head h, query head of its group, chunk of AT_ROW_CHUNK queries)
#         pack      the blocks of Q and dO; delta, the row sums of dO * O                  once
#         for each chunk of 256 keys:
#             for each block of query rows:
#                 S, dP           the tile of the scores, with K and Q, V and dO
#                 P, dS           in their places
#                 dq              the tile of the values, with K in place of V
#                 dk, dv          of the cell: the one new product, whose lanes are columns and whose chain is the rows
#             dk and dv of the cell into those of the head, after the tasks before
#         unpack    dq
#
# P and dS of a cell (2 x 192 x 256 floats: 384 KiB) stay in L2. The memory beside the gradients is that of a task.
#
# The tasks of a head share its dk and dv, and with a bias that is repeated all tasks share its gradient. Each element has
# one order of additions all the same: task after task. So a task that has finished a cell waits until the one before it has
# passed this chunk of keys. Tasks start at the first chunk, so each follows a cell behind the one before; and some heads
# are at work at once where there are several. So threads hardly ever wait. Tasks are handed out in an order in which
# none comes before one that it waits for.
#
# Order of operations: kernels/kernels.h, BACKWARD. Included by _core.pyx after _pass.pxi.

cdef enum:
    UNITS_PER_THREAD = 2                        # at work at once, if there are so many
    MAX_BACKWARD_BLOCKS = 32                    # of a task: AT_ROW_CHUNK / rows of the smallest block of any ISA

cdef int64_t PASSED_ALL = 1 << 62               # chunks, of a task that has ended

cdef struct Backward:
    Job *job                                    # with the options; it has no output
    Strided dout, out, lse, dlse                # [query]: what is given; dlse may be NULL
    Strided dq, dk, dv                          # where the gradients go, NULL: not wanted
    Strided dbias, delta                        # likewise
    int dout_format, o_format, dq_format, dk_format, dv_format
    double *dslopes                             # [query head], NULL: not wanted
    double scale
    Py_ssize_t row_chunks, tasks_per_unit       # of a query head; of a unit = (batch, key head)
    Py_ssize_t together                         # units that are at work at once
    bint in_turn                                # all tasks add to the same elements of dbias,
    bint by_row                                 #   or to those of a row when they end: it has one number for all keys
    int64_t *passed                             # [unit][task of it] chunks of keys that it has passed
    double *distances                           # likewise: its part of dslopes
    char *sums                                  # [unit % n_sums] dk and dv in the type of the tiles, if stored otherwise
    Py_ssize_t n_sums, sums_bytes, block_bytes

# A block of rows during a task, beside Block.
cdef struct RowGradients:
    Block *rows
    char *dout_t                                # [value_width][pitch]
    char *dq_t                                  # [width][pitch]
    at_row_numbers numbers
    const char *q_rows[AT_MAX_ROWS]             # in the type of the tiles
    const char *dout_rows[AT_MAX_ROWS]
    bint finite                                 # every number of these rows is
    bint first                                  # dq_t holds nothing yet
    char *p                                     # [AT_CHUNK][pitch] S, then P
    char *ds                                    # [AT_CHUNK][pitch] dP, then dS
    Py_ssize_t start, stop                      # the keys of the chunk that they are about
    bint excludes                               # some of these pairs may be excluded
    double bias_sums[AT_MAX_ROWS]               # of dS, for a bias that has one number for all keys

# What a task has beside Shared, and the cell that it is at.
cdef struct Cell:
    Py_ssize_t unit, place, task                # place: of the task in its unit; task: counted from unit to unit
    Py_ssize_t b, kv_head, head, i              # head: query head; i: first query
    RowGradients *blocks[MAX_BACKWARD_BLOCKS]
    Py_ssize_t n_blocks, lo, hi                 # keys that some row of them sees
    Py_ssize_t c                                # the chunk of keys
    Rows k, v
    bint careful                                # 0 times a number of the operands may be NaN
    double distances
    char *ones                                  # [pitch]
    char *line                                  # [row][AT_CHUNK] dS of a block, row by row
    char *rows                                  # [row] of out or dq, to be widened or narrowed


# ---------------------------------------------------------------------------------------------------------------
# Scratch
# ---------------------------------------------------------------------------------------------------------------
cdef inline bint is_summed_apart(const Job *job, const Strided *array, int format) noexcept nogil:
    return array.data != NULL and format != own_format(job)


cdef Cell *open_cell(const Backward *back, char **free_bytes) noexcept nogil:
    """From the slot's scratch, for a task."""
    cdef const Job *job = back.job
    cdef Py_ssize_t item = <Py_ssize_t> job.tiles.itemsize, rows = largest_pitch(job)
    cdef Cell *cell = <Cell *> take(free_bytes, sizeof(Cell))
    cell.ones = take(free_bytes, rows * item)
    cell.line = take(free_bytes, AT_CHUNK * rows * item) if back.dbias.data != NULL else NULL
    cell.rows = take(free_bytes, rows * max(job.width, job.value_width) * item)
    fill_reals(cell.ones, item, rows, 1)
    return cell


cdef Py_ssize_t cell_bytes(const Backward *back) noexcept nogil:
    """Bytes that open_cell() and the scores after softcap take."""
    cdef const Job *job = back.job
    cdef Py_ssize_t item = <Py_ssize_t> job.tiles.itemsize, rows = largest_pitch(job)
    return (aligned(sizeof(Cell)) + aligned(rows * item) + aligned(rows * max(job.width, job.value_width) * item)
            + ((job.softcap != 0) + (back.dbias.data != NULL)) * aligned(AT_CHUNK * rows * item))


cdef Py_ssize_t row_gradient_bytes(const Backward *back) noexcept nogil:
    """Bytes of a block: Block with its buffers, RowGradients with its own."""
    cdef const Job *job = back.job
    cdef Py_ssize_t item = <Py_ssize_t> job.tiles.itemsize, rows = largest_pitch(job)
    cdef Py_ssize_t nbytes = job.block_bytes + aligned(sizeof(RowGradients)) + 3 * aligned(rows * item)
    nbytes += aligned(rows * job.width * item) + aligned(rows * job.value_width * item)
    nbytes += 2 * aligned(AT_CHUNK * rows * item)
    if job.q_format != own_format(job):
        nbytes += aligned(rows * job.width * item)
    if back.dout_format != own_format(job):
        nbytes += aligned(rows * job.value_width * item)
    return nbytes


# ---------------------------------------------------------------------------------------------------------------
# The rows of a task
# ---------------------------------------------------------------------------------------------------------------
cdef void widen_each(const Job *job, const char **rows, Py_ssize_t n, Py_ssize_t width, int format,
                     char *to) noexcept nogil:
    """Rows of another format into scratch; rows[r] is there then."""
    cdef Py_ssize_t r
    for r in range(n):
        job.tiles.widen(to, rows[r], width, format)
        rows[r] = to
        to += width * <Py_ssize_t> job.tiles.itemsize


cdef void find_row_numbers(const Backward *back, const Cell *cell, RowGradients *block, Py_ssize_t i) noexcept nogil:
    """The numbers of each row from its delta, which the tile has left; i: query of row 0.

    With the share of the softmax that a sink leaves: dS = exp(s - lse) (share (dP - delta) + dlse).
    """
    cdef const Job *job = back.job
    cdef Py_ssize_t item = <Py_ssize_t> job.tiles.itemsize, r
    cdef double lse, share, delta
    fill_reals(<char *> block.numbers.lse, item, block.rows.pitch, INFINITY)
    fill_reals(<char *> block.numbers.share, item, block.rows.pitch, 1)
    for r in range(block.rows.n_rows):
        delta = real_at(<char *> block.numbers.delta + r * item, item)
        if back.delta.data != NULL:
            set_real(at(&back.delta, cell.b, cell.head, i + r), item, delta)
        lse = real_at(at(&back.lse, cell.b, cell.head, i + r), item) * LOG2E
        share = 1
        if lse == -INFINITY:                    # no key
            lse, delta = INFINITY, 0
        else:
            if job.sinks != NULL:
                share = 1 / (1 + at_exp2(block.rows.row_sink[r] - lse))
            delta *= share
            if back.dlse.data != NULL:
                delta -= real_at(at(&back.dlse, cell.b, cell.head, i + r), item)
        set_real(<char *> block.numbers.lse + r * item, item, lse)
        set_real(<char *> block.numbers.share + r * item, item, share)
        set_real(<char *> block.numbers.delta + r * item, item, delta)


cdef void open_row_gradients(const Backward *back, const Cell *cell, RowGradients *block, char *free_bytes,
                             Py_ssize_t i) noexcept nogil:
    """Up to block_rows rows from query i on, of which none is of another head or chunk of rows."""
    cdef const Job *job = back.job
    cdef Py_ssize_t item = <Py_ssize_t> job.tiles.itemsize, n
    cdef const char *out_rows[AT_MAX_ROWS]
    cdef Block *rows = <Block *> take(&free_bytes, sizeof(Block))
    block.rows = rows
    open_block(job, rows, free_bytes, cell.b, cell.kv_head, cell.head % job.group * job.queries + i)
    free_bytes += job.block_bytes - aligned(sizeof(Block))
    n = min(rows.n_rows, job.queries - i)
    if n < rows.n_rows:                         # a block of the pass may run on into the next head
        rows.n_rows = n
        rows.vectors = <int> ((n + job.tiles.lanes - 1) // job.tiles.lanes)
        rows.pitch = rows.vectors * job.tiles.lanes
        find_intervals(job, rows, cell.b, i)
    block.dout_t = take(&free_bytes, rows.pitch * job.value_width * item)
    block.dq_t = take(&free_bytes, rows.pitch * job.width * item)
    block.p = take(&free_bytes, AT_CHUNK * rows.pitch * item)
    block.ds = take(&free_bytes, AT_CHUNK * rows.pitch * item)
    block.numbers.lse = take(&free_bytes, rows.pitch * item)
    block.numbers.share = take(&free_bytes, rows.pitch * item)
    block.numbers.delta = take(&free_bytes, rows.pitch * item)
    block.first = True
    memset(block.bias_sums, 0, sizeof(block.bias_sums))
    point_rows(job, block.dout_rows, &back.dout, cell.b, cell.head, i, n)
    point_rows(job, out_rows, &back.out, cell.b, cell.head, i, n)
    memcpy(block.q_rows, rows.q_rows, n * sizeof(char *))
    if back.o_format != own_format(job):
        widen_each(job, out_rows, n, job.value_width, back.o_format, cell.rows)
    job.tiles.pack(rows.ot, out_rows, n, rows.vectors, job.value_width, 1)
    if job.q_format != own_format(job):
        widen_each(job, block.q_rows, n, job.width, job.q_format, take(&free_bytes, rows.pitch * job.width * item))
    if back.dout_format != own_format(job):
        widen_each(job, block.dout_rows, n, job.value_width, back.dout_format,
                   take(&free_bytes, rows.pitch * job.value_width * item))
    job.tiles.pack(rows.qt, block.q_rows, n, rows.vectors, job.width, job.factor)
    job.tiles.pack(block.dout_t, block.dout_rows, n, rows.vectors, job.value_width, 1)
    job.tiles.row_dots(block.numbers.delta, block.dout_t, rows.ot, rows.vectors, job.value_width)
    find_row_numbers(back, cell, block, i)
    block.finite = (job.tiles.all_finite(block.q_rows, n, job.width)
                    and job.tiles.all_finite(block.dout_rows, n, job.value_width))


cdef void store_dq(const Backward *back, const Cell *cell, Shared *shared, RowGradients *block,
                   Py_ssize_t i) noexcept nogil:
    """scale * dq to its rows."""
    cdef const Job *job = back.job
    cdef Py_ssize_t item = <Py_ssize_t> job.tiles.itemsize, r
    cdef bint narrows = back.dq_format != own_format(job)
    cdef char *rows[AT_MAX_ROWS]
    if back.dq.data == NULL:
        return
    if block.first:
        memset(block.dq_t, 0, block.rows.pitch * job.width * item)
    fill_reals(shared.alpha, item, block.rows.pitch, back.scale)
    for r in range(block.rows.n_rows):
        rows[r] = cell.rows + r * job.width * item if narrows else at(&back.dq, cell.b, cell.head, i + r)
    job.tiles.unpack(rows, block.dq_t, shared.alpha, block.rows.n_rows, block.rows.vectors, job.width)
    for r in range(block.rows.n_rows if narrows else 0):
        job.tiles.narrow(at(&back.dq, cell.b, cell.head, i + r), rows[r], job.width, back.dq_format)


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


cdef void add_to_head(const Backward *back, const Cell *cell, const Strided *array, int format, bint of_dk) noexcept nogil:
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
