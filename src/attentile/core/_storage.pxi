# Arrays and pages that are stored in another format than the tiles compute in: float16, bfloat16, or float32 where the
# arithmetic is float64. One place each for reading a chunk of keys, a chunk of values and the rows of a block, and for
# writing its results. A chunk is widened into the slot's scratch, once for all blocks of a task, and only the keys that
# some row may see; the tiles for few rows read most formats directly (_few.pxi). No whole array is ever converted.
#
# Rows that lie far apart, as those of a head do where a token's heads lie side by side, are gathered there in the same
# way: each of them is on a page of memory of its own, and in steps of a power of two they share few places of a cache.
# Included by _core.pyx after _blocks.pxi.

# Keys or values of a chunk as tiles take them: the first, and the bytes to the next (of panels as in key_chunk).
cdef struct Rows:
    const char *first
    Py_ssize_t stride


cdef inline bint is_stored(const Job *job, Py_ssize_t b, Py_ssize_t c) noexcept nogil:
    """False for the chunks that a windowed cache has evicted."""
    return job.pages == NULL or job.pages[b * job.pages_batch + c] != 0


cdef void bring_rows(const Job *job, char *to, const char *first, Py_ssize_t stride, Py_ssize_t n, Py_ssize_t width,
                     int format) noexcept nogil:
    """n rows into scratch, without gaps, in the format of the tiles."""
    cdef Py_ssize_t r, row = width * <Py_ssize_t> job.tiles.itemsize
    if format == own_format(job):
        for r in range(n):
            memcpy(to + r * row, first + r * stride, row)
    elif stride == width * AT_SIZE_OF(format):
        job.tiles.widen(to, first, n * width, format)
    else:
        for r in range(n):
            job.tiles.widen(to + r * row, first + r * stride, width, format)


cdef Rows bring_keys(const Job *job, Shared *shared, Py_ssize_t b, Py_ssize_t head, Py_ssize_t c, Py_ssize_t lo,
                     Py_ssize_t hi) noexcept nogil:
    """The keys of chunk c; no row sees one before lo or from hi on, counted over all chunks."""
    cdef Rows k
    k.first, k.stride = key_chunk(job, b, head, c), job.k.row
    if not brings_keys(job):
        return k
    lo = max(lo - c * AT_CHUNK, 0) // AT_PANEL * AT_PANEL
    hi = min(hi - c * AT_CHUNK, chunk_keys(job, c))
    if job.pages != NULL:                       # whole panels, which pages have
        hi = (hi + AT_PANEL - 1) // AT_PANEL * AT_PANEL
    if lo < hi and is_stored(job, b, c):
        bring_rows(job, shared.keys + lo * job.width * <Py_ssize_t> job.tiles.itemsize, k.first + lo * k.stride,
                   k.stride, hi - lo, job.width, job.k_format)
    k.first, k.stride = shared.keys, job.width * <Py_ssize_t> job.tiles.itemsize
    return k


cdef Rows bring_values(const Job *job, Shared *shared, Py_ssize_t b, Py_ssize_t head, Py_ssize_t c, Py_ssize_t lo,
                       Py_ssize_t hi) noexcept nogil:
    """The values of chunk c, in the same way."""
    cdef Rows v
    v.first, v.stride = value_chunk(job, b, head, c), job.v.row
    if not brings_values(job):
        return v
    lo = max(lo - c * AT_CHUNK, 0)
    hi = min(hi - c * AT_CHUNK, chunk_keys(job, c))
    if lo < hi:
        bring_rows(job, shared.wide_values + lo * job.value_width * <Py_ssize_t> job.tiles.itemsize,
                   v.first + lo * v.stride, v.stride, hi - lo, job.value_width, job.v_format)
    v.first, v.stride = shared.wide_values, job.value_width * <Py_ssize_t> job.tiles.itemsize
    return v


cdef void pack_rows(const Job *job, Block *block, Shared *shared) noexcept nogil:
    """block.qt from the queries."""
    cdef Py_ssize_t r, row = job.width * <Py_ssize_t> job.tiles.itemsize
    cdef const char *rows[AT_MAX_ROWS]
    cdef const char **q = block.q_rows
    if job.q_format != own_format(job):
        q = rows
        for r in range(block.n_rows):
            job.tiles.widen(shared.rows + r * row, block.q_rows[r], job.width, job.q_format)
            rows[r] = shared.rows + r * row
    if job.few:
        job.tiles.few_pack(block.qt, q, block.n_rows, job.width, job.factor)
    else:
        job.tiles.pack(block.qt, q, block.n_rows, block.vectors, job.width, job.factor)


cdef void store_rows(const Job *job, Block *block, Shared *shared) noexcept nogil:
    """o / l to the rows of the output, with 1 / l in shared.alpha."""
    cdef Py_ssize_t item = <Py_ssize_t> job.tiles.itemsize, r, row = job.value_width * item
    cdef bint narrows = job.out_format != own_format(job)
    cdef char *rows[AT_MAX_ROWS]
    cdef char **to = block.out_rows
    if narrows:
        to = rows
        for r in range(block.n_rows):
            rows[r] = shared.rows + r * row
    if job.few:
        for r in range(block.n_rows):
            job.tiles.few_store(to[r], block.ot + r * job.few_pitch * item, job.value_width,
                                real_at(shared.alpha + r * item, item))
    else:
        job.tiles.unpack(to, block.ot, shared.alpha, block.n_rows, block.vectors, job.value_width)
    for r in range(block.n_rows if narrows else 0):
        job.tiles.narrow(block.out_rows[r], rows[r], job.value_width, job.out_format)
