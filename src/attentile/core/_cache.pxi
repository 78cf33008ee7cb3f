# Entries for the key-value cache (cache/kv_cache.py, cache/pages.py). Included by _core.pyx.
#
# Page c of an item holds its tokens c * page_keys ... for all key heads: keys as (head, page_keys / 16, width, 16),
# then values as (head, page_keys, value_width). A page of 256 tokens is a chunk of the pass, so the pass takes a page's
# address where it takes a row of K otherwise.

cdef struct Layout:
    Py_ssize_t kv_heads, page_keys, width, value_width
    int format                                  # AT_F16 ...
    Py_ssize_t item                             # bytes of a number

cdef dict STORED = {"float16": AT_F16, "bfloat16": AT_BF16, "float32": AT_F32, "float64": AT_F64}


cdef inline Layout layout_of(tuple shape, str dtype):
    cdef Layout layout
    layout.kv_heads, layout.page_keys, layout.width, layout.value_width = shape
    layout.format = STORED[dtype]
    layout.item = AT_SIZE_OF(layout.format)
    return layout


cdef inline void bind_pages(Job *job, const Layout *layout, const Py_ssize_t[:, ::1] table) noexcept nogil:
    cdef Py_ssize_t item = layout.item
    job.k_format = layout.format
    job.v_format = layout.format
    job.value_width = layout.value_width
    job.key_step = AT_PANEL
    job.k.row, job.k.head = layout.width * item, layout.page_keys * layout.width * item
    job.v.row, job.v.head = layout.value_width * item, layout.page_keys * layout.value_width * item
    job.pages, job.pages_batch = &table[0, 0], table.shape[1]
    job.value_offset = layout.kv_heads * job.k.head


# ---------------------------------------------------------------------------------------------------------------
# Tokens in
# ---------------------------------------------------------------------------------------------------------------
# Keys or values of an append, of a format of their own.
cdef struct Tokens:
    Strided rows
    int format

cdef enum:
    SLICE = 64                                  # widths that are brought into panels, or narrowed, at once


cdef inline const at_tiles *tiles_of(int format) noexcept nogil:
    return active.f64 if format == AT_F64 else active.f32


cdef void store_panels(const Layout *layout, char *to, const char *rows, const Tokens *k,
                       Py_ssize_t keys) noexcept nogil:
    """Whole panels of keys, which are to be rounded to 16 bits: brought into panels as they are, in scratch."""
    cdef char memory[SLICE * AT_PANEL * 8 + AT_ALIGN]
    cdef void *scratch = <void *> ((<uintptr_t> memory + AT_ALIGN) & ~(<uintptr_t> AT_ALIGN - 1))
    cdef const at_tiles *tiles = tiles_of(k.format)
    cdef Py_ssize_t d, n, j
    for j in range(keys // AT_PANEL):
        d = 0
        while d < layout.width:
            n = min(<Py_ssize_t> SLICE, layout.width - d)
            tiles.to_panels(scratch, rows + d * AT_SIZE_OF(k.format), k.rows.row, n, AT_PANEL)
            tiles.narrow(to + d * AT_PANEL * layout.item, scratch, n * AT_PANEL, layout.format)
            d += n
        to += AT_PANEL * layout.width * layout.item
        rows += AT_PANEL * k.rows.row


cdef void store_key(const Layout *layout, char *to, const char *row, int format) noexcept nogil:
    """One key to its place in a panel, the first element at `to`."""
    cdef uint16_t scratch[SLICE]
    cdef const uint16_t *halves
    cdef Py_ssize_t d = 0, x, n
    if layout.format == AT_F32:
        for d in range(layout.width):
            (<float *> to)[d * AT_PANEL] = (<const float *> row)[d]
    elif layout.format == AT_F64:
        for d in range(layout.width):
            (<double *> to)[d * AT_PANEL] = (<const double *> row)[d]
    else:
        while d < layout.width:
            n = min(<Py_ssize_t> SLICE, layout.width - d)
            halves = <const uint16_t *> row + d
            if format != layout.format:
                tiles_of(format).narrow(<char *> scratch, row + d * AT_SIZE_OF(format), n, layout.format)
                halves = scratch
            for x in range(n):
                (<uint16_t *> to)[(d + x) * AT_PANEL] = halves[x]
            d += n


cdef void store_keys(const Layout *layout, char *page, const char *rows, const Tokens *k, Py_ssize_t slot,
                     Py_ssize_t n) noexcept nogil:
    """n keys to the slots slot ... of one head's panels: whole panels by tiles, the others one by one."""
    cdef Py_ssize_t whole
    cdef char *to
    while n > 0:
        to = page + slot // AT_PANEL * AT_PANEL * layout.width * layout.item
        if slot % AT_PANEL == 0 and n >= AT_PANEL and (k.format != layout.format or layout.item > 2):
            whole = n // AT_PANEL * AT_PANEL
            if k.format == layout.format:
                tiles_of(k.format).to_panels(to, rows, k.rows.row, layout.width, whole)
            else:
                store_panels(layout, to, rows, k, whole)
        else:
            whole = 1
            store_key(layout, to + slot % AT_PANEL * layout.item, rows, k.format)
        rows += whole * k.rows.row
        slot += whole
        n -= whole


cdef void store_item(const Layout *layout, const Py_ssize_t *pages, Py_ssize_t first, Py_ssize_t n, const Tokens *k,
                     const Tokens *v, Py_ssize_t b) noexcept nogil:
    """n tokens of item b, which are its tokens first ... on these pages, page by page and head by head."""
    cdef Py_ssize_t done = 0, slot, part, h, j
    cdef Py_ssize_t key_head = layout.page_keys * layout.width * layout.item
    cdef Py_ssize_t value_row = layout.value_width * layout.item, value_head = layout.page_keys * value_row
    cdef char *page
    cdef char *to
    while done < n:
        slot = (first + done) % layout.page_keys
        part = min(n - done, layout.page_keys - slot)
        page = <char *> pages[(first + done) // layout.page_keys]
        for h in range(layout.kv_heads):
            store_keys(layout, page + h * key_head, at(&k.rows, b, h, done), k, slot, part)
            to = page + layout.kv_heads * key_head + h * value_head + slot * value_row
            for j in range(part):
                if v.format == layout.format:
                    memcpy(to + j * value_row, at(&v.rows, b, h, done + j), value_row)
                else:
                    tiles_of(v.format).narrow(to + j * value_row, at(&v.rows, b, h, done + j),
                                              layout.value_width, layout.format)
        done += part


cdef bint take_tokens(Batch *batch, Tokens *tokens, array, int format, const Layout *layout,
                      Py_ssize_t width) except -1:
    """k or v (B, H, n, width), if it is in the format of the pages or is rounded to it, and can be read as it is."""
    cdef Py_buffer *view
    tokens.format = format
    if tokens.format != layout.format and not (layout.item == 2 and tokens.format >= AT_F32):
        return False
    view = borrow_numbers(batch, array, format)
    if view.shape[1] != layout.kv_heads or view.shape[3] != width or is_empty(view):
        return False
    tokens.rows.data = <char *> view.buf
    tokens.rows.batch = view.strides[0]
    tokens.rows.head = view.strides[1]
    tokens.rows.row = view.strides[2]
    return is_direct(view, view.itemsize)


def store_tokens(k, v, tuple shape, str dtype, const Py_ssize_t[:, ::1] table, const Py_ssize_t[::1] starts,
                 const Py_ssize_t[::1] counts):
    """The first counts[b] tokens of k, v (B, H, n, width) to starts[b] ... on opened pages; last axis contiguous.

    shape: (kv_heads, page_keys, width, value_width). dtype: of the pages, and of k and v; those of 16 bits take float32
    and float64 too, and the bits of bfloat16 as uint16. table (B, pages) of addresses, starts, counts (B,), all intp.
    """
    cdef Layout layout = layout_of(shape, dtype)
    cdef Batch batch
    cdef Tokens keys, values
    cdef Py_ssize_t b
    open_batch(&batch)
    try:
        if not (take_tokens(&batch, &keys, k, format_of(k.dtype, True), &layout, layout.width)
                and take_tokens(&batch, &values, v, format_of(v.dtype, True), &layout, layout.value_width)):
            raise SystemError("attentile: the core does not take what was checked; please report this call")
        with nogil:
            for b in range(counts.shape[0]):
                if counts[b] > 0:
                    store_item(&layout, &table[b, 0], starts[b], counts[b], &keys, &values, b)
    finally:
        close_batch(&batch)


# ---------------------------------------------------------------------------------------------------------------
# A cache as its calls see it
# ---------------------------------------------------------------------------------------------------------------
cdef class CacheView:
    """The arrays of a KVCache, held ready for its calls, and the guard that keeps calls apart that must not meet.

    shape, dtype and table as in store_tokens; lengths and held_from (B,) are read and, by append and truncate, written;
    writable (B,): tokens up to which an item's pages are there and its own. left, kept, capacity: window, sink_tokens
    and capacity of the cache, -1 for none; rotary: queries have positions even if nothing else asks for them. What a
    method answers with False or None is for Python to convert or explain. inside: the caller is in a block of using();
    else the method enters the guard itself, and a cache that is in use is another False or None.
    """
    cdef int users                              # see kernels/guard.h
    cdef readonly bint bound                    # whether the arrays are those of the cache
    cdef Layout layout
    cdef const Py_ssize_t[:, ::1] table
    cdef Py_ssize_t[::1] lengths
    cdef Py_ssize_t[::1] held_from
    cdef const Py_ssize_t[::1] writable
    cdef Py_ssize_t left, kept, capacity
    cdef bint rotary

    def __init__(self, tuple shape, str dtype, tuple limits, bint rotary):
        self.layout = layout_of(shape, dtype)
        self.left, self.kept, self.capacity = limits
        self.rotary = rotary

    def bind(self, arrays):
        """The arrays (table, lengths, held_from, writable) of the cache from now on, or None while they change."""
        self.bound = False
        if arrays is not None:
            self.table, self.lengths, self.held_from, self.writable = arrays
            self.bound = True

    def using(self, bint change, str refusal):
        """A block that has the cache for itself, to change it, or reads it; else RuntimeError with this text."""
        return Using(self, change, refusal)

    def append(self, k, v, bint bits, bint inside=True):
        """Tokens k, v (B, H, n, width) for every item, if they fit into open pages and no page is to be evicted.

        bits: those of uint16 hold bfloat16.
        """
        if type(k) is not ndarray or type(v) is not ndarray:
            return False
        if k.ndim != 4 or v.ndim != 4 or not (inside or at_guard_enter(&self.users, True)):
            return False
        try:
            return self.bound and append_tokens(self, k, v, bits)
        finally:
            if not inside:
                at_guard_leave(&self.users, True)

    def truncate(self, length, bint inside=True):
        """Every item back to `length` tokens, if that gives up no page."""
        if type(length) is not int or not 0 < length <= PY_SSIZE_T_MAX:
            return False
        if not (inside or at_guard_enter(&self.users, True)):
            return False
        try:
            return self.bound and truncate_all(self, length)
        finally:
            if not inside:
                at_guard_leave(&self.users, True)

    def fill(self, q, dict options, intervals, outputs, int threads, bint apart=False):
        """attend() with checked values and outputs, as attend() of _door.pxi takes them, of which none is empty.

        apart: the kept first tokens are not meant; intervals leave them out.
        """
        cdef Call call
        open_call(&call, 3)
        try:
            if intervals is not None:
                call.given[INTERVALS] = <PyObject *> intervals
            if not (self.bound and number_options(&call, options) and take_pages(&call, self, q)
                    and take_options(&call) and place_in_cache(&call, self)):
                raise SystemError("attentile: the core does not take what was checked; please report this call")
            if apart:
                call.job.structure.kept = 0
            take_outputs(&call, outputs)
            run_call(&call, run_attention, &call.job, threads)
        finally:
            close_batch(&call.batch)

    def attend(self, q, dict options, int threads, bint inside=True):
        """Queries (B, Hq, L, width) over the tokens; options and results as attention() of _door.pxi has them."""
        cdef Call call
        if not (inside or at_guard_enter(&self.users, False)):
            return None
        open_call(&call, 3)
        try:
            if not (self.bound and number_options(&call, options) and take_pages(&call, self, q)
                    and take_options(&call) and place_in_cache(&call, self)):
                return None
            return call_results(&call, threads)
        finally:
            close_batch(&call.batch)
            if not inside:
                at_guard_leave(&self.users, False)


cdef class Using:
    """What CacheView.using() returns. In C, because no interrupt can come between its steps and those of `with`."""
    cdef CacheView view
    cdef bint change
    cdef str refusal

    def __init__(self, CacheView view, bint change, str refusal):
        self.view = view
        self.change = change
        self.refusal = refusal

    def __enter__(self):
        if not at_guard_enter(&self.view.users, self.change):
            raise RuntimeError(self.refusal)

    def __exit__(self, *_):
        at_guard_leave(&self.view.users, self.change)


cdef bint truncate_all(CacheView view, Py_ssize_t end):
    cdef Py_ssize_t b, size = view.layout.page_keys
    for b in range(view.lengths.shape[0]):
        if end > view.lengths[b] or (end - 1) // size != (view.lengths[b] - 1) // size:
            return False
        if view.left >= 0 and (end <= max(view.kept, view.held_from[b]) or end - view.left < view.held_from[b]):
            return False
    for b in range(view.lengths.shape[0]):
        view.lengths[b] = end
    return True


cdef bint may_append(CacheView view, Py_ssize_t n):
    """Whether n tokens fit into every item's open pages, within the capacity and without a page to evict."""
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


cdef bint append_tokens(CacheView view, k, v, bint bits) except -1:
    cdef Layout *layout = &view.layout
    cdef Batch batch
    cdef Tokens keys, values
    cdef Py_ssize_t b, n, items = view.lengths.shape[0]
    open_batch(&batch)
    try:
        if not (take_tokens(&batch, &keys, k, format_of(k.dtype, bits), layout, layout.width)
                and take_tokens(&batch, &values, v, format_of(v.dtype, bits), layout, layout.value_width)):
            return False
        n = batch.views[0].shape[2]
        if (batch.views[0].shape[0] != items or batch.views[1].shape[0] != items or batch.views[1].shape[2] != n
                or not may_append(view, n)):
            return False
        with nogil:
            for b in range(items):
                store_item(layout, &view.table[b, 0], view.lengths[b], n, &keys, &values, b)
                if view.left >= 0:
                    view.held_from[b] = max(view.held_from[b], view.lengths[b] - view.left)
                view.lengths[b] += n
        return True
    finally:
        close_batch(&batch)


cdef int take_pages(Call *call, CacheView view, q) except -1:
    """Queries, and the pages in the place of keys and values."""
    cdef Job *job = &call.job
    cdef Py_buffer *queries = &call.batch.views[0]
    cdef Py_ssize_t b
    job.q_format = format_in(call, q)
    if job.q_format < 0:
        return 0
    take_arithmetic(call, view.layout.format == AT_F64)
    if job.q_format == view.layout.format:
        job.out_format = job.q_format
        call.result = <PyObject *> q.dtype
    elif job.q_format != own_format(job):
        return 0
    if not take_queries(call, q) or queries.ndim != 4:
        return 0
    for b in range(view.lengths.shape[0]):
        job.keys = max(job.keys, view.lengths[b])
    if queries.shape[0] != view.lengths.shape[0] or job.width != view.layout.width or job.keys == 0:
        return 0
    bind(&call.batch, &job.q, queries, 3)
    if not settle_job(job, view.layout.kv_heads):
        return 0
    bind_pages(job, &view.layout, view.table)
    return 1


cdef inline bint is_one_or(value, Py_ssize_t items) except -1:
    """Whether this is one integer for all items, or one for each: none that repeats."""
    if type(value) is ndarray:
        return value.ndim == 0 or value.size == items
    return type(value) not in (list, tuple) or len(value) == items


cdef int place_in_cache(Call *call, CacheView view) except -1:
    """Where the queries stand: the last tokens of each item, unless something else is said (KVCache.attend)."""
    cdef Job *job = &call.job
    cdef Structure *structure = &job.structure
    cdef Py_ssize_t b
    cdef bint asked
    if view.left >= 0 and (call.windowed or structure.prefixes.data != NULL):
        return 0
    if call.given[KEY_LENGTHS] != NULL and not is_one_or(<object> call.given[KEY_LENGTHS], view.lengths.shape[0]):
        return 0
    fold_batch(&call.batch, &job.batch)         # from here on integers can be read item by item
    for b in range(view.lengths.shape[0]):
        if integer_of(&structure.lengths, b, 0) > view.lengths[b]:
            return 0
    if structure.lengths.data == NULL:
        structure.lengths.data = <char *> &view.lengths[0]
        structure.lengths.batch = sizeof(Py_ssize_t)
    if call.given[CAUSAL] == NULL:
        call.causal = PLAIN if call.placed else LOWER_RIGHT
        structure.causal = True
    if structure.prefixes.data != NULL and not structure.causal:
        return 0
    if call.placed:
        asked = structure.causal or call.windowed or view.left >= 0 or job.slopes != NULL or view.rotary
        if call.causal > PLAIN or not asked:
            return 0
    elif call.causal == PLAIN and job.queries != job.keys:
        return 0
    structure.from_end = call.causal == NOT_CAUSAL or call.causal == LOWER_RIGHT
    structure.some = True
    return take_window_of(job, view)


cdef int take_window_of(Job *job, CacheView view) except -1:
    """The cache's own window and kept first tokens; 0 if a row needs tokens that are gone."""
    cdef Structure *structure = &job.structure
    cdef Item item
    cdef Py_ssize_t b, i, position
    if view.left < 0:
        return 1
    structure.left = view.left
    structure.right = 0
    structure.kept = view.kept
    structure.mask_in_rows = structure.mask_in_rows and view.kept == 0
    for b in range(view.lengths.shape[0]):
        item = item_of(job, b)
        for i in range(job.queries):
            position = item.first + i
            if max(position - view.left, view.kept) < min(position + 1, min(item.length, view.held_from[b])):
                return 0
    return 1
