# Entries for the key-value cache (cache/kv_cache.py, cache/pages.py). Included by _core.pyx.
#
# Page c of an item holds its tokens c * page_keys ... for all key heads: keys as (head, page_keys / 16, width, 16),
# then values as (head, page_keys, value_width). A page of 256 tokens is a chunk of the pass, so the pass takes a page's
# address where it takes a row of K otherwise.

cdef struct Layout:
    Py_ssize_t kv_heads, page_keys, width, value_width


cdef inline Layout layout_of(tuple shape):
    cdef Layout layout
    layout.kv_heads, layout.page_keys, layout.width, layout.value_width = shape
    return layout


cdef inline void bind_pages(Job *job, const Layout *layout, const Py_ssize_t[:, ::1] table) noexcept nogil:
    cdef Py_ssize_t item = <Py_ssize_t> job.tiles.itemsize
    job.value_width = layout.value_width
    job.key_step = AT_PANEL
    job.k.row, job.k.head = layout.width * item, layout.page_keys * layout.width * item
    job.v.row, job.v.head = layout.value_width * item, layout.page_keys * layout.value_width * item
    job.pages, job.pages_batch = &table[0, 0], table.shape[1]
    job.value_offset = layout.kv_heads * job.k.head


# ---------------------------------------------------------------------------------------------------------------
# Tokens in
# ---------------------------------------------------------------------------------------------------------------
cdef void store_keys(const at_tiles *tiles, char *page, const char *rows, Py_ssize_t stride, Py_ssize_t width,
                     Py_ssize_t slot, Py_ssize_t n) noexcept nogil:
    """n keys to the slots slot ... of one head's panels: whole panels by the tile, the others one by one."""
    cdef Py_ssize_t item = <Py_ssize_t> tiles.itemsize, whole, d
    cdef char *to
    while n > 0:
        to = page + slot // AT_PANEL * AT_PANEL * width * item
        if slot % AT_PANEL == 0 and n >= AT_PANEL:
            whole = n // AT_PANEL * AT_PANEL
            tiles.to_panels(to, rows, stride, width, whole)
            rows, slot, n = rows + whole * stride, slot + whole, n - whole
            continue
        to += slot % AT_PANEL * item
        if item == 4:
            for d in range(width):
                (<float *> to)[d * AT_PANEL] = (<const float *> rows)[d]
        else:
            for d in range(width):
                (<double *> to)[d * AT_PANEL] = (<const double *> rows)[d]
        rows, slot, n = rows + stride, slot + 1, n - 1


cdef void store_item(const Layout *layout, size_t itemsize, const Py_ssize_t *pages, Py_ssize_t first, Py_ssize_t n,
                     const char *k, Py_ssize_t k_head, Py_ssize_t k_row, const char *v, Py_ssize_t v_head,
                     Py_ssize_t v_row) noexcept nogil:
    """The tokens first ... first + n of one item, page by page and head by head."""
    cdef const at_tiles *tiles = active.f32 if itemsize == sizeof(float) else active.f64
    cdef Py_ssize_t item = <Py_ssize_t> itemsize, done = 0, slot, part, h, j
    cdef Py_ssize_t key_head = layout.page_keys * layout.width * item
    cdef Py_ssize_t value_row = layout.value_width * item, value_head = layout.page_keys * value_row
    cdef char *page
    cdef char *to
    while done < n:
        slot = (first + done) % layout.page_keys
        part = min(n - done, layout.page_keys - slot)
        page = <char *> pages[(first + done) // layout.page_keys]
        for h in range(layout.kv_heads):
            store_keys(tiles, page + h * key_head, k + h * k_head + done * k_row, k_row, layout.width, slot, part)
            to = page + layout.kv_heads * key_head + h * value_head + slot * value_row
            for j in range(part):
                memcpy(to + j * value_row, v + h * v_head + (done + j) * v_row, value_row)
        done += part


cdef int store_typed(const real[:, :, :, :] k, const real[:, :, :, :] v, const Layout *layout,
                     const Py_ssize_t[:, ::1] table, const Py_ssize_t[::1] starts,
                     const Py_ssize_t[::1] counts) except -1:
    cdef Py_ssize_t b
    with nogil:
        for b in range(k.shape[0]):
            if counts[b] > 0:
                store_item(layout, sizeof(real), &table[b, 0], starts[b], counts[b], <const char *> &k[b, 0, 0, 0],
                           k.strides[1], k.strides[2], <const char *> &v[b, 0, 0, 0], v.strides[1], v.strides[2])
    return 0


def store_tokens(k, v, tuple shape, table, starts, counts):
    """The first counts[b] tokens of k, v (B, H, n, width) to starts[b] ... on opened pages; last axis contiguous.

    shape: (kv_heads, page_keys, width, value_width). table (B, pages) of addresses, starts, counts (B,), all intp.
    """
    cdef Layout layout = layout_of(shape)
    if k.itemsize == 4:
        store_typed[float](k, v, &layout, table, starts, counts)
    else:
        store_typed[double](k, v, &layout, table, starts, counts)


# ---------------------------------------------------------------------------------------------------------------
# Attention over the pages
# ---------------------------------------------------------------------------------------------------------------
cdef int attend_pages_typed(const real[:, :, :, :] q, const Layout *layout, const Py_ssize_t[:, ::1] table,
                            Py_ssize_t keys, Py_ssize_t kept, real[:, :, :, :] out, double scale, int threads,
                            const unsigned char[:, :, :, :] mask, const real[:, :, :, :] bias,
                            const Py_ssize_t[:, ::1] lo, const Py_ssize_t[:, ::1] hi, real[:, :, :] lse,
                            real[:, :, :, :] weights, double softcap, const double[::1] sinks,
                            const double[::1] slopes, const Py_ssize_t[::1] start) except -1:
    cdef Job job
    start_job(&job, sizeof(real), &q[0, 0, 0, 0], q.shape, q.strides, layout.kv_heads, keys)
    describe_scores[real](&job, mask, bias, lo, hi, softcap, slopes, start)
    bind_pages(&job, layout, table)
    job.kept = kept
    return attend_typed[real](&job, out, scale, threads, lse, weights, None, sinks)


def attend_pages(q, tuple shape, table, Py_ssize_t keys, Py_ssize_t kept, out, double scale, int threads, *, mask=None,
                 bias=None, lo=None, hi=None, lse=None, weights=None, double softcap=0, sinks=None, slopes=None,
                 start=None):
    """attend() over the keys and values on pages; shape and table as in store_tokens.

    keys: S, at most page_keys if that is not a chunk. kept: every row sees the first `kept` keys below its hi. Keys
    that no row sees need no page.
    """
    cdef Layout layout = layout_of(shape)
    if out.itemsize == 4:
        attend_pages_typed[float](q, &layout, table, keys, kept, out, scale, threads, mask, bias, lo, hi, lse, weights,
                                  softcap, sinks, slopes, start)
    else:
        attend_pages_typed[double](q, &layout, table, keys, kept, out, scale, threads, mask, bias, lo, hi, lse, weights,
                                   softcap, sinks, slopes, start)


# ---------------------------------------------------------------------------------------------------------------
# The commonest calls
# ---------------------------------------------------------------------------------------------------------------
cdef class CacheView:
    """The arrays of a KVCache, held ready for its commonest calls, which then take a microsecond or two beside their
    work.

    shape and table as in store_tokens; lengths and held_from (B,) are read and, by append, written; writable (B,):
    tokens up to which an item's pages are there and its own. left, kept, capacity: window, sinks and capacity of the
    cache, -1 for none. A view is good until the cache replaces one of its arrays.
    """
    cdef Layout layout
    cdef const Py_ssize_t[:, ::1] table
    cdef Py_ssize_t[::1] lengths
    cdef Py_ssize_t[::1] held_from
    cdef const Py_ssize_t[::1] writable
    cdef Py_ssize_t left, kept, capacity
    cdef object dtype

    def __init__(self, tuple shape, table, lengths, held_from, writable, dtype, Py_ssize_t left, Py_ssize_t kept,
                 Py_ssize_t capacity):
        self.layout = layout_of(shape)
        self.table, self.lengths, self.held_from, self.writable = table, lengths, held_from, writable
        self.dtype, self.left, self.kept, self.capacity = dtype, left, kept, capacity

    def append(self, k, v):
        """KVCache.append without options, with its checks: False if the general way must decide."""
        if type(k) is not ndarray or type(v) is not ndarray or k.dtype is not self.dtype or v.dtype is not self.dtype:
            return False
        if k.ndim != 4 or v.ndim != 4:
            return False
        if self.dtype is float32:
            return append_typed[float](self, k, v)
        return append_typed[double](self, k, v)

    def attend(self, q, int threads, scale=None, softcap=None):
        """KVCache.attend of the last tokens, with its checks: None if the general way must decide."""
        if type(q) is not ndarray or q.dtype is not self.dtype or q.ndim != 4:
            return None
        # What is near the ends of the range of float32 is for the general way, which knows the range of each dtype.
        if scale is not None and (type(scale) is not float or not isfinite(<float> (<double> scale * LOG2E))):
            return None
        if softcap is not None and (type(softcap) is not float or not 1e-37 < softcap < 8e37):
            return None
        if self.dtype is float32:
            return attend_last[float](self, q, threads, scale, softcap or 0.0)
        return attend_last[double](self, q, threads, scale, softcap or 0.0)


cdef bint may_append(CacheView view, Py_ssize_t n):
    """Whether n tokens fit into every item's open pages, within the capacity and without a page to drop."""
    cdef Py_ssize_t b, held, size = view.layout.page_keys
    for b in range(view.lengths.shape[0]):
        if view.lengths[b] + n > view.writable[b]:
            return False
        held = view.held_from[b]
        if view.left >= 0:
            held = max(held, view.lengths[b] - view.left)
            if held // size != view.held_from[b] // size:
                return False
        if view.capacity >= 0 and view.lengths[b] + n - max(held - view.kept, 0) > view.capacity:
            return False
    return True


cdef bint append_typed(CacheView view, const real[:, :, :, :] k, const real[:, :, :, :] v) except -1:
    cdef Py_ssize_t b, n = k.shape[2], batch = k.shape[0]
    cdef Layout *layout = &view.layout
    if (batch != view.lengths.shape[0] or v.shape[0] != batch or v.shape[2] != n or n == 0 or batch == 0
            or k.shape[1] != layout.kv_heads or v.shape[1] != layout.kv_heads or k.shape[3] != layout.width
            or v.shape[3] != layout.value_width or not is_direct(k) or not is_direct(v) or not may_append(view, n)):
        return False
    with nogil:
        for b in range(batch):
            store_item(layout, sizeof(real), &view.table[b, 0], view.lengths[b], n, <const char *> &k[b, 0, 0, 0],
                       k.strides[1], k.strides[2], <const char *> &v[b, 0, 0, 0], v.strides[1], v.strides[2])
            if view.left >= 0:
                view.held_from[b] = max(view.held_from[b], view.lengths[b] - view.left)
            view.lengths[b] += n
    return True


cdef bint place_last(CacheView view, Py_ssize_t rows, Py_ssize_t *lo, Py_ssize_t *hi):
    """Intervals [item][row] of the last `rows` tokens; False if a row needs a token that is gone."""
    cdef Py_ssize_t b, i, position, first
    for b in range(view.lengths.shape[0]):
        for i in range(rows):
            position = view.lengths[b] - rows + i
            first = max(position - view.left, 0) if view.left >= 0 else 0
            if view.left >= 0 and max(first, view.kept) < min(position + 1, view.held_from[b]):
                return False
            hi[b * rows + i] = max(position + 1, 0)
            lo[b * rows + i] = min(first, hi[b * rows + i])
    return True


cdef object attend_last(CacheView view, const real[:, :, :, :] q, int threads, scale, double softcap):
    cdef Py_ssize_t b, batch = q.shape[0], rows = q.shape[2], longest = 0
    cdef Layout *layout = &view.layout
    cdef bint ragged = False
    cdef real[:, :, :, :] out
    cdef Job job
    cdef Py_ssize_t *intervals = NULL
    cdef double factor = (1.0 / sqrt(<double> layout.width)) if scale is None else scale
    if (batch != view.lengths.shape[0] or q.shape[1] == 0 or q.shape[1] % layout.kv_heads != 0 or batch * rows == 0
            or q.shape[3] != layout.width or not is_direct(q)):
        return None
    for b in range(batch):
        ragged = ragged or view.lengths[b] != view.lengths[0]
        longest = max(longest, view.lengths[b])
    if longest == 0:
        return None
    result = empty((batch, q.shape[1], rows, layout.value_width), view.dtype)
    out = result
    start_job(&job, sizeof(real), &q[0, 0, 0, 0], q.shape, q.strides, layout.kv_heads, longest)
    bind_pages(&job, layout, view.table)
    bind(&job.out, &out[0, 0, 0, 0], out.strides)
    job.softcap = softcap
    try:
        if ragged or rows > 1 or view.left >= 0:
            intervals = <Py_ssize_t *> malloc(2 * batch * rows * sizeof(Py_ssize_t))
            if intervals == NULL:
                raise MemoryError("KVCache.attend: no memory for the intervals of the rows")
            if not place_last(view, rows, intervals, intervals + batch * rows):
                return None
            job.lo, job.hi, job.interval_batch, job.kept = intervals, intervals + batch * rows, rows, view.kept
        with nogil:
            run_job(&job, factor, threads)
    finally:
        free(intervals)
    return result
