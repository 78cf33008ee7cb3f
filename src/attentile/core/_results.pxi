# Where the results of a call go, and its run over all batch items. Included by _core.pyx after _call.pxi.


cdef tuple result_shape(const Call *call, Py_ssize_t columns):
    """(..., Hq, L, columns), or without columns if that is negative; with the caller's axes."""
    cdef int a
    cdef list shape = [call.batch.shape[a] for a in range(call.batch.axes)]
    if call.tail == 3 and not call.drop:
        shape.append(call.job.kv_heads * call.job.group)
    shape.append(call.job.queries)
    if columns >= 0:
        shape.append(columns)
    return tuple(shape)


cdef bint has_result_shape(const Call *call, const Py_buffer *view, Py_ssize_t columns) noexcept:
    cdef int a, n = call.batch.axes
    if view.ndim != n + (call.tail == 3 and not call.drop) + 1 + (columns >= 0):
        return False
    for a in range(n):
        if view.shape[a] != call.batch.shape[a]:
            return False
    if call.tail == 3 and not call.drop:
        if view.shape[n] != call.job.kv_heads * call.job.group:
            return False
        n += 1
    return view.shape[n] == call.job.queries and (columns < 0 or view.shape[n + 1] == columns)


cdef Py_buffer *borrow_result(Call *call, array, PyObject *dtype, Py_ssize_t columns) except? NULL:
    """An array in the shape of a result that can be used as it is; NULL if not. Rows without columns: any stride."""
    cdef Py_buffer *view
    cdef bint usable
    if type(array) is not ndarray or array.dtype is not <object> dtype:
        return NULL
    view = borrow_numbers(&call.batch, array, call.job.out_format if dtype == call.result else own_format(&call.job))
    if not has_result_shape(call, view, columns):
        return NULL
    usable = is_direct(view, view.itemsize) if columns >= 0 else is_aligned(view, view.itemsize)
    return view if usable else NULL


cdef inline void bind_result(Call *call, Strided *to, const Py_buffer *view) noexcept:
    bind(&call.batch, to, view, 2 if call.drop else call.tail)


cdef inline void bind_result_rows(Call *call, Strided *to, const Py_buffer *view) noexcept:
    bind_rows(&call.batch, to, view, (2 if call.drop else call.tail) - 1)


cdef int take_out(Call *call, array) except -1:
    """The caller's array for the result: one that can be written, overlaps neither itself nor what is read."""
    cdef int x, inputs = call.batch.n_views
    cdef Py_buffer *view = borrow_result(call, array, call.result, call.job.value_width)
    if view == NULL or view.readonly or not is_spread(view):
        return 0
    for x in range(inputs):
        if may_overlap(view, &call.batch.views[x]):
            return 0
    bind_result(call, &call.job.out, view)
    return 1


cdef object own_out(Call *call):
    """A new array for the output."""
    out = empty(result_shape(call, call.job.value_width), <object> call.result)
    bind_result(call, &call.job.out, borrow_numbers(&call.batch, out, call.job.out_format))
    return out


cdef int bind_own(Call *call, Strided *to, array, bint rows) except -1:
    """A result that was allocated for this call, in the dtype of the arithmetic."""
    cdef Py_buffer *view = borrow(&call.batch, array)
    if rows:
        bind_result_rows(call, to, view)
    else:
        bind_result(call, to, view)
    return 0


# ---------------------------------------------------------------------------------------------------------------
# The run
# ---------------------------------------------------------------------------------------------------------------
cdef inline int take_flag(Call *call, int option, bint *to) except -1:
    to[0] = False
    if call.given[option] != NULL:
        value = <object> call.given[option]
        if value is not True and value is not False:
            return 0
        to[0] = value is True
    return 1


cdef inline int take_threads(Call *call, int *threads) except -1:
    """num_threads= if it was given."""
    if call.given[NUM_THREADS] == NULL:
        return 1
    value = <object> call.given[NUM_THREADS]
    if type(value) is not int or not 1 <= value <= MAX_THREADS:
        return 0
    threads[0] = value
    return 1


ctypedef int (*Runner)(void *what, int threads) except -1 nogil


cdef int run_attention(void *job, int threads) except -1 nogil:
    return run_job(<Job *> job, threads)


cdef int run_call(Call *call, Runner run, void *what, int threads) except -1:
    """`run` over all batch items: once if their axes fold into one."""
    cdef Py_ssize_t index[MAX_AXES]
    cdef int outer
    with nogil:
        outer = fold_batch(&call.batch, &call.job.batch)
        memset(index, 0, outer * sizeof(Py_ssize_t))
        while True:
            run(what, threads)
            if not next_items(&call.batch, outer, index):
                break
    return 0
