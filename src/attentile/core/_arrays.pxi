# Python's arrays as a call sees them: borrowed memory of any number of axes, and batch axes that broadcast and fold.
#
#     q     (2, 1, 12, 100, 64)     batch axes (2, 1)   ┐
#     k, v  (   8,  4, 100, 64)     batch axes    (8,)  ├─ broadcast to (2, 8): a stride of 0 where an array is repeated
#     mask  (       1, 100, 100)    batch axes     ()   ┘
#
# The pass knows one batch axis. So the last axes are folded into one as long as the strides of every array allow it,
# and what is left over is run through, one call of the pass after the other. Nothing is copied. Arrays are borrowed
# through the buffer protocol and not as typed memoryviews, which have a fixed number of axes.
#
# Included by _core.pyx after _blocks.pxi.

cdef enum:
    MAX_AXES = 64                               # of an array: NumPy's own limit
    MAX_ARRAYS = 32                             # that one call can have

# An array with batch axes: where its job keeps the address of the first item and the bytes from one to the next.
cdef struct Operand:
    char **data
    Py_ssize_t *step
    Py_ssize_t strides[MAX_AXES]                # of the call's batch axes

cdef struct Batch:
    int axes
    Py_ssize_t shape[MAX_AXES]
    int n_operands
    Operand operands[MAX_ARRAYS]
    int n_views
    Py_buffer views[MAX_ARRAYS]


cdef inline void open_batch(Batch *batch) noexcept:
    batch.axes = 0
    batch.n_operands = 0
    batch.n_views = 0


cdef inline void close_batch(Batch *batch) noexcept:
    """Gives the borrowed memory back."""
    while batch.n_views > 0:
        batch.n_views -= 1
        PyBuffer_Release(&batch.views[batch.n_views])


cdef Py_buffer *borrow(Batch *batch, array) except NULL:
    """The memory of an array until close_batch()."""
    cdef Py_buffer *view = &batch.views[batch.n_views]
    PyObject_GetBuffer(array, view, PyBUF_STRIDES)
    batch.n_views += 1
    return view


cdef inline Py_buffer *borrow_numbers(Batch *batch, array, int format) except NULL:
    """The same of an array in this format: bfloat16 has no buffer of its own."""
    return borrow(batch, array.view(uint16) if format == AT_BF16 else array)


cdef inline Py_ssize_t extent(const Py_buffer *view, int from_end) noexcept:
    """Length of the axis that stands so far from the end, 1 if there is none."""
    return view.shape[view.ndim - from_end] if view.ndim >= from_end else 1


cdef inline Py_ssize_t step_of(const Py_buffer *view, int from_end) noexcept:
    """Bytes from one element of this axis to the next, 0 if it has only one."""
    return view.strides[view.ndim - from_end] if view.ndim >= from_end and extent(view, from_end) != 1 else 0


cdef inline bint is_empty(const Py_buffer *view) noexcept:
    cdef int a
    for a in range(view.ndim):
        if view.shape[a] == 0:
            return True
    return False


cdef bint is_aligned(const Py_buffer *view, Py_ssize_t item) noexcept:
    """Whether every element is aligned to its size; NumPy's own rule: an axis of one may have any stride."""
    cdef Py_ssize_t bits = <Py_ssize_t> view.buf
    cdef int a
    for a in range(view.ndim):
        if view.shape[a] != 1:
            bits |= view.strides[a]
    return bits & (item - 1) == 0


cdef bint is_direct(const Py_buffer *view, Py_ssize_t item) noexcept:
    """Whether an array can be read as it is: last axis contiguous, every row aligned to its elements."""
    return is_aligned(view, item) and (view.strides[view.ndim - 1] == item or view.shape[view.ndim - 1] == 1)


cdef bint widen_batch(Batch *batch, const Py_buffer *view, int tail) noexcept:
    """Broadcasts the call's batch axes with those of an array, all but its last `tail`; False if they do not."""
    cdef int n = max(view.ndim - tail, 0), a
    cdef Py_ssize_t *shape
    while batch.axes < n:                       # axes are few: moved up one by one
        for a in range(batch.axes, 0, -1):
            batch.shape[a] = batch.shape[a - 1]
        batch.shape[0] = 1
        batch.axes += 1
    shape = batch.shape + batch.axes - n
    for a in range(n):
        if shape[a] == 1:
            shape[a] = view.shape[a]
        elif view.shape[a] != 1 and view.shape[a] != shape[a]:
            return False
    return True


cdef bint fits_batch(const Batch *batch, const Py_buffer *view, int tail) noexcept:
    """Whether the axes before the last `tail` broadcast to the batch axes, as they now are."""
    cdef int n = view.ndim - tail, a
    if n > batch.axes:
        return False
    for a in range(n):
        if view.shape[a] != 1 and view.shape[a] != batch.shape[batch.axes - n + a]:
            return False
    return True


cdef void join_batch(Batch *batch, char **data, Py_ssize_t *step, const Py_buffer *view, int tail) noexcept:
    """From now on *data and *step follow the batch items of this array."""
    cdef Operand *operand = &batch.operands[batch.n_operands]
    cdef int a, x
    batch.n_operands += 1
    operand.data = data
    operand.step = step
    data[0] = <char *> view.buf
    for a in range(batch.axes):
        x = view.ndim - tail - batch.axes + a
        operand.strides[a] = view.strides[x] if x >= 0 and view.shape[x] != 1 else 0


cdef inline void bind(Batch *batch, Strided *to, const Py_buffer *view, int tail) noexcept:
    """An array (..., heads, rows, columns), or with tail 2 without heads; axes that are missing or repeated count 0."""
    to.head = step_of(view, 3) if tail == 3 else 0
    to.row = step_of(view, 2)
    to.column = step_of(view, 1)
    join_batch(batch, &to.data, &to.batch, view, tail)


cdef inline void bind_rows(Batch *batch, Strided *to, const Py_buffer *view, int tail) noexcept:
    """The same without columns: (..., heads, rows), with tail 1 (..., rows)."""
    to.head = step_of(view, 2) if tail == 2 else 0
    to.row = step_of(view, 1)
    to.column = 0
    join_batch(batch, &to.data, &to.batch, view, tail)


cdef inline void bind_four(Strided *to, const void *data, Py_ssize_t *strides) noexcept:
    """An array of four axes, as its memoryview tells."""
    to.data = <char *> data
    to.batch = strides[0]
    to.head = strides[1]
    to.row = strides[2]
    to.column = strides[3]


cdef bint can_fold(const Batch *batch, int axis, Py_ssize_t items) noexcept nogil:
    """Whether this axis goes on where the items that are folded already end, in every array."""
    cdef int x
    for x in range(batch.n_operands):
        if batch.operands[x].strides[axis] != batch.operands[x].step[0] * items:
            return False
    return True


cdef int fold_batch(Batch *batch, Py_ssize_t *items) noexcept nogil:
    """Folds the last axes into one of so many items; how many axes are left to run through."""
    cdef int axis = batch.axes, x
    items[0] = 1
    for x in range(batch.n_operands):
        batch.operands[x].step[0] = 0
    while axis > 0:
        if batch.shape[axis - 1] != 1:
            if items[0] == 1:
                for x in range(batch.n_operands):
                    batch.operands[x].step[0] = batch.operands[x].strides[axis - 1]
            elif not can_fold(batch, axis - 1, items[0]):
                return axis
            items[0] *= batch.shape[axis - 1]
        axis -= 1
    return 0


cdef void move_batch(Batch *batch, int axis, Py_ssize_t items) noexcept nogil:
    """Every array goes so many items further along this axis."""
    cdef int x
    for x in range(batch.n_operands):
        batch.operands[x].data[0] += batch.operands[x].strides[axis] * items


cdef bint next_items(Batch *batch, int outer, Py_ssize_t *index) noexcept nogil:
    """To the next index of the outer axes, the last one fastest; False after the last."""
    cdef int axis = outer - 1
    while axis >= 0:
        index[axis] += 1
        if index[axis] < batch.shape[axis]:
            move_batch(batch, axis, 1)
            return True
        move_batch(batch, axis, 1 - index[axis])
        index[axis] = 0
        axis -= 1
    return False


# ---------------------------------------------------------------------------------------------------------------
# Where arrays lie
# ---------------------------------------------------------------------------------------------------------------
cdef void reach_of(const Py_buffer *view, Py_ssize_t item, uintptr_t *first, uintptr_t *end) noexcept:
    """The bytes that an array lies within."""
    cdef int a
    cdef Py_ssize_t way
    first[0] = <uintptr_t> view.buf
    end[0] = first[0] + item
    for a in range(view.ndim):
        way = view.strides[a] * (view.shape[a] - 1)
        if way < 0:
            first[0] += way
        else:
            end[0] += way


cdef bint may_overlap(const Py_buffer *one, const Py_buffer *other) noexcept:
    """Whether two arrays may share memory, by their bounds."""
    cdef uintptr_t first, end, other_first, other_end
    reach_of(one, one.itemsize, &first, &end)
    reach_of(other, other.itemsize, &other_first, &other_end)
    return first < other_end and other_first < end


cdef bint is_spread(const Py_buffer *view) noexcept:
    """Whether every element surely has a place of its own: each axis steps over all that the smaller steps cover."""
    cdef Py_ssize_t reach = view.itemsize, step, smallest
    cdef int a, pick, n
    cdef bint done[MAX_AXES]
    for a in range(view.ndim):
        done[a] = view.shape[a] == 1
    for n in range(view.ndim):
        pick = -1
        for a in range(view.ndim):
            if not done[a] and (pick < 0 or abs(view.strides[a]) < smallest):
                pick = a
                smallest = abs(view.strides[a])
        if pick < 0:
            return True
        done[pick] = True
        step = smallest
        if step < reach:
            return False
        reach += (view.shape[pick] - 1) * step
    return True
