# Rotary position embedding: x (batch, head, row, width), the pairs of a row rotated by the angles of its position.
# Included by _core.pyx.
#
#     position = 64 a + b         fine:   64 rows of sines and cosines, one per b, shared by all tasks of a call
#                                 coarse: those of one a, renewed when a changes
#     table of TABLE_ROWS rows    row = fine rotated by coarse, or the caller's own cosines and sines
#          |
#          +--> plane 0, plane 1, ...      (a plane is one head of one batch item: rows x width)
#
# Everything is memory traffic but the tables, so a table is made once and all planes with these positions run over it.
# With 64 rows it lies in the L2 cache, 64 KiB for 64 pairs; with 16 rows it would fit into L1, but a plane's 16 rows
# are over before the prefetchers of the core are at full speed: 18 % slower on (1, 32, 2048, 128) in float32. How a
# position is split, and why pairs go in strips, is told in _angles.pxi.

cdef enum:
    TABLE_ROWS = 64
    ROTARY_TASKS_PER_THREAD = 4
# Below this many elements (about 100 us of one core) a call stays in its thread.
cdef Py_ssize_t SERIAL_ELEMENTS = 1 << 19

cdef struct Rotary:
    const at_angles *angles
    Strided x, y
    Py_ssize_t item_bytes                       # of an element
    Py_ssize_t items, planes, heads             # items: batch items with positions of their own; planes: of each
    Py_ssize_t length, width, pairs
    const int64_t *positions                    # [item][row]; NULL: first, first + 1, ...
    int64_t first
    const double *high                          # [pairs] quarter turns per position; NULL: the caller's tables are used
    const double *low
    Strided cosines, sines                      # [position][pair] of the caller
    Py_ssize_t table_bytes                      # of one of their elements
    double cosine_factor, sine_factor
    bint interleaved
    bint heads_inside                           # heads lie closer together than rows, if there are several
    void (*rotate_rows)(const at_rotary_rows *rows) noexcept nogil
    # The strip that is at work: pairs [from_pair, from_pair + strip), padded to whole blocks.
    Py_ssize_t from_pair, strip, padded
    double *fine                                # [FINE_ROWS][cosines, sines]
    double *strip_high
    double *strip_low
    # Division of work.
    Py_ssize_t blocks, groups, planes_per_group
    double *slots
    Py_ssize_t slot_doubles, pitch


cdef inline int64_t position_of(const Rotary *job, Py_ssize_t item, Py_ssize_t row) noexcept nogil:
    return job.first + row if job.positions == NULL else job.positions[item * job.length + row]


cdef void copy_table_row(const Rotary *job, double *row, int64_t position) noexcept nogil:
    """A row of the caller's tables in the layout that rotate_rows takes."""
    cdef Py_ssize_t i, spread = 2 if job.interleaved else 1
    cdef const char *cosines = job.cosines.data + position * job.cosines.row + job.from_pair * job.table_bytes
    cdef const char *sines = job.sines.data + position * job.sines.row + job.from_pair * job.table_bytes
    cdef double *to = row + spread * job.padded
    for i in range(job.strip):
        row[spread * i] = real_at(cosines + i * job.table_bytes, job.table_bytes) * job.cosine_factor
        to[spread * i] = real_at(sines + i * job.table_bytes, job.table_bytes) * job.sine_factor
        if job.interleaved:
            row[2 * i + 1] = row[2 * i]
            to[2 * i + 1] = to[2 * i]
            to[2 * i] = -to[2 * i]


cdef void make_table(const Rotary *job, double *table, double *coarse, Py_ssize_t item, Py_ssize_t start,
                     Py_ssize_t rows) noexcept nogil:
    """table[r]: what rotates row start + r."""
    cdef Py_ssize_t r
    cdef int64_t position, b, a = 0
    for r in range(rows):
        position = position_of(job, item, start + r)
        if job.high == NULL:
            copy_table_row(job, table + r * job.pitch, position)
            continue
        b = fine_row(position)
        if r == 0 or position - b != a:
            a = position - b
            job.angles.sincos(coarse, coarse + job.padded, <double> a, job.strip_high, job.strip_low, job.padded,
                              AT_APART)
        job.angles.sum_of(table + r * job.pitch, coarse, job.fine + 2 * b * job.padded, job.padded, job.cosine_factor,
                          job.sine_factor, job.interleaved)


cdef void rotary_task(void *raw, Py_ssize_t index, int slot) noexcept nogil:
    """One block of rows in one group of planes."""
    cdef const Rotary *job = <const Rotary *> raw
    cdef Py_ssize_t group = index % job.groups, block = index // job.groups % job.blocks
    cdef Py_ssize_t item = index // job.groups // job.blocks, start = block * TABLE_ROWS
    cdef Py_ssize_t n = min(<Py_ssize_t> TABLE_ROWS, job.length - start), plane = group * job.planes_per_group
    cdef Py_ssize_t end = min(job.planes, plane + job.planes_per_group), heads, b, h, r
    cdef Py_ssize_t offset = job.from_pair * job.item_bytes * (2 if job.interleaved else 1)
    cdef double *coarse = job.slots + slot * job.slot_doubles
    cdef double *table = coarse + 2 * job.padded
    cdef at_rotary_rows rows
    make_table(job, table, coarse, item, start, n)
    rows.pairs, rows.apart = job.strip, job.pairs
    rows.sines = job.pitch // 2
    rows.tail = job.width - 2 * job.pairs if job.from_pair + job.strip == job.pairs else 0
    rows.tail_from = 2 * job.pairs - offset // job.item_bytes
    while plane < end:
        b, h = item + plane // job.heads, plane % job.heads
        heads = min(job.heads - h, end - plane)
        for r in range(n if job.heads_inside else heads):
            if job.heads_inside:                # heads lie side by side: one row of the table for all of them
                rows.x, rows.y = at(&job.x, b, h, start + r), at(&job.y, b, h, start + r)
                rows.x_stride, rows.y_stride = job.x.head, job.y.head
                rows.rows = heads
                rows.table, rows.pitch = table + r * job.pitch, 0
            else:
                rows.x, rows.y = at(&job.x, b, h + r, start), at(&job.y, b, h + r, start)
                rows.x_stride, rows.y_stride = job.x.row, job.y.row
                rows.rows = n
                rows.table, rows.pitch = table, job.pitch
            rows.x += offset
            rows.y += offset
            job.rotate_rows(&rows)
        plane += heads


cdef void make_fine(const Rotary *job) noexcept nogil:
    """Sines and cosines of those b that the call meets."""
    cdef bint there[FINE_ROWS]
    cdef Py_ssize_t i, found = 0, n = job.length * (1 if job.positions == NULL else job.items)
    cdef int64_t b
    memset(there, 0, sizeof(there))
    for i in range(n):
        b = fine_row(position_of(job, 0, i))
        if there[b]:
            continue
        there[b] = True
        job.angles.sincos(job.fine + 2 * b * job.padded, job.fine + (2 * b + 1) * job.padded, <double> b,
                          job.strip_high, job.strip_low, job.padded, AT_APART)
        found += 1
        if found == FINE_ROWS:
            break


cdef int run_rotary(Rotary *job, int threads) except -1 nogil:
    """Divides the work, finds scratch, runs strip after strip."""
    cdef Py_ssize_t widest = whole_blocks(min(job.pairs, <Py_ssize_t> STRIP_PAIRS)), units, doubles
    cdef double *scratch
    job.blocks = (job.length + TABLE_ROWS - 1) // TABLE_ROWS
    units = job.items * job.blocks
    if job.items * job.planes * job.length * job.width < SERIAL_ELEMENTS:
        threads = 1
    job.groups = 1
    if threads > 1 and units < ROTARY_TASKS_PER_THREAD * threads:
        job.groups = min(job.planes, (ROTARY_TASKS_PER_THREAD * threads + units - 1) // units)
    job.planes_per_group = (job.planes + job.groups - 1) // job.groups
    job.groups = (job.planes + job.planes_per_group - 1) // job.planes_per_group
    threads = <int> min(<Py_ssize_t> threads, units * job.groups)
    job.slot_doubles = widest * (2 + TABLE_ROWS * (4 if job.interleaved else 2))
    doubles = widest * (2 + 2 * FINE_ROWS) + threads * job.slot_doubles
    scratch = <double *> scratch_of(doubles * sizeof(double))
    job.strip_high = scratch
    job.strip_low = job.strip_high + widest
    job.fine = job.strip_low + widest
    job.slots = job.fine + 2 * FINE_ROWS * widest
    job.from_pair = 0
    while job.from_pair < job.pairs:
        job.strip = min(job.pairs - job.from_pair, <Py_ssize_t> STRIP_PAIRS)
        job.padded = whole_blocks(job.strip)
        job.pitch = job.padded * (4 if job.interleaved else 2)
        if job.high != NULL:
            memset(scratch, 0, 2 * widest * sizeof(double))
            memcpy(job.strip_high, job.high + job.from_pair, job.strip * sizeof(double))
            memcpy(job.strip_low, job.low + job.from_pair, job.strip * sizeof(double))
            make_fine(job)
        else:                                   # what pads a copied row is loaded and never stored
            memset(job.slots, 0, threads * job.slot_doubles * sizeof(double))
        at_pool_run(rotary_task, job, units * job.groups, threads)
        job.from_pair += job.strip
    return 0


cdef int bind_table(Strided *to, table) except -1:
    """Two axes, float32 or float64, last axis contiguous."""
    cdef const float[:, :] single
    cdef const double[:, :] double_
    memset(to, 0, sizeof(Strided))
    if table.itemsize == 4:
        single = table
        to.data, to.row = <char *> &single[0, 0], single.strides[0]
    else:
        double_ = table
        to.data, to.row = <char *> &double_[0, 0], double_.strides[0]
    return 0


ctypedef fused element:
    float
    double
    uint16_t                                    # the bits of a float16 or bfloat16


cdef int rotate_typed(Rotary *job, const element[:, :, :, :] x, element[:, :, :, :] y, int format) except -1:
    cdef Py_ssize_t shared = job.positions == NULL or job.items == 1
    job.item_bytes = sizeof(element)
    job.items = x.shape[0]
    job.planes = job.heads = x.shape[1]
    if shared:                                  # the planes of all batch items run over one table
        job.items, job.planes = 1, x.shape[0] * x.shape[1]
    job.length, job.width = x.shape[2], x.shape[3]
    job.heads_inside = x.shape[1] > 1 and (x.shape[2] == 1 or abs(x.strides[1]) < abs(x.strides[2]))
    job.rotate_rows = job.angles.rotate_rows[format][job.interleaved]
    bind_four(&job.x, &x[0, 0, 0, 0], x.strides)
    bind_four(&job.y, &y[0, 0, 0, 0], y.strides)
    return 0


def rotate(x, y, rotation, positions, long long first, int threads):
    """Rotates non-empty x (B, H, L, D) into y, which may be x. See positions/rotary.py, which checks.

    x, y: of one floating dtype, native, aligned, the last axis contiguous. rotation: of twin_angles.py; high and
    low (pairs,) float64, or cosines and sines (n, pairs), float32 or float64, last axis contiguous, for positions from
    0 to n - 1. positions: (1 or B, L) int64, or None for first, first + 1, ... All angles are at most 2^50.
    """
    cdef Rotary job
    cdef const int64_t[:, ::1] at_positions
    cdef const double[::1] high_view, low_view
    memset(&job, 0, sizeof(Rotary))
    job.angles = active.angles
    job.first = first
    job.pairs, job.interleaved = rotation.pairs, rotation.interleaved
    job.cosine_factor, job.sine_factor = rotation.cosine_factor, rotation.sine_factor
    if positions is not None:
        at_positions = positions
        job.positions, job.items = &at_positions[0, 0], at_positions.shape[0]
    if rotation.high is not None:
        high_view, low_view = rotation.high, rotation.low
        job.high, job.low = &high_view[0], &low_view[0]
    else:
        bind_table(&job.cosines, rotation.cosines)
        bind_table(&job.sines, rotation.sines)
        job.table_bytes = rotation.cosines.itemsize
    if y.itemsize == 4:
        rotate_typed[float](&job, x, y, AT_F32)
    elif y.itemsize == 8:
        rotate_typed[double](&job, x, y, AT_F64)
    else:
        rotate_typed[uint16_t](&job, x.view(uint16), y.view(uint16), AT_F16 if y.dtype.kind == "f" else AT_BF16)
    with nogil:
        run_rotary(&job, threads)
