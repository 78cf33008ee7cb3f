# The backward pass of one call, and what a thread holds while it works on it: the rows of a task, and the cell that it
# is at. The story is told in _backward.pxi. Included by _core.pyx after _pass.pxi.

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
    char *sums                                  # [unit % n_sums] dk and dv if they are stored otherwise
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
