# The entries: Python's values in, results out. Included by _core.pyx after _call.pxi.
#
#     attention(q, k, v, options)       what the caller gave, if it can be taken as it is; else None
#     textbook(Q, K, V, d_k, ...)       likewise, for the functions of textbook.py
#     attend(scores, v, outputs)        checked values (scores.py, outputs.py), which is where a None leads
#     stats(scores, v, ...)             the second pass of the statistics over the same values
#     backward(scores, v, ...)          the gradients of a call over the same values
#     takes(q, k, v, options)           whether attention() would take the values as they are
#     explain(scores, v, ...)           what attend() would do with checked values, in numbers


# What a call is to give, besides the output.
cdef struct Wanted:
    bint lse, weights
    int threads                                 # num_threads=, or what it was before


cdef int take_wanted(Call *call, Wanted *wanted) except -1:
    """What does not change the scores."""
    return (take_flag(call, RETURN_LSE, &wanted.lse) and take_flag(call, RETURN_WEIGHTS, &wanted.weights)
            and take_threads(call, &wanted.threads)
            and (call.given[OUT] == NULL or take_out(call, <object> call.given[OUT])))


cdef object call_results(Call *call, int threads):
    """Takes or allocates what a call writes and runs it: the output, or a tuple (out, lse, weights); None: not so."""
    cdef Wanted wanted
    wanted.threads = threads
    if not take_wanted(call, &wanted):
        return None
    lse = weights = None
    if call.given[OUT] != NULL:
        out = <object> call.given[OUT]
    else:
        out = own_out(call)
    if wanted.lse:
        lse = empty(result_shape(call, -1), <object> call.dtype)
        bind_own(call, &call.job.lse, lse, True)
    if wanted.weights:
        weights = zeros(result_shape(call, call.job.keys), <object> call.dtype)
        bind_own(call, &call.job.weights, weights, False)
    run_call(call, run_attention, &call.job, wanted.threads)
    if wanted.weights and call.result != call.dtype:
        weights = narrowed(weights, <object> call.result, call.job.out_format)
    return (out, lse, weights) if wanted.lse or wanted.weights else out


cdef int take_call(Call *call, q, k, v, dict options) except -1:
    """Everything that decides the scores, of a call by public names."""
    return (number_options(call, options) and take_arrays(call, q, k, v) and take_options(call)
            and place_queries(call))


cdef object narrowed(weights, dtype, int format):
    """A new array of this 16-bit dtype from a contiguous one in float32."""
    half = empty(weights.shape, dtype)
    cdef const float[::1] source = weights.reshape(-1)
    cdef uint16_t[::1] to = half.view(uint16).reshape(-1)
    if source.shape[0] > 0:
        active.f32.narrow(<char *> &to[0], &source[0], source.shape[0], format)
    return half


def takes(q, k, v, dict options):
    """Whether attention() takes these values as they are."""
    cdef Call call
    cdef Wanted wanted
    open_call(&call, 3)
    try:
        return bool(take_call(&call, q, k, v, options) and take_wanted(&call, &wanted))
    finally:
        close_batch(&call.batch)


def attention(q, k, v, dict options, int threads):
    """attention() of attention.py for values that can be taken as they are; None if Python must convert or explain.

    q, k, v: of native floating dtypes, last axis contiguous, any batch axes. options: by their public names.
    """
    cdef Call call
    open_call(&call, 3)
    try:
        return call_results(&call, threads) if take_call(&call, q, k, v, options) else None
    finally:
        close_batch(&call.batch)


def partial(q, k, v, dict options, int threads):
    """The same without finishing the rows: (m, l, o) of partial.py, or None."""
    cdef Call call
    open_call(&call, 3)
    try:
        if not (take_call(&call, q, k, v, options) and take_threads(&call, &threads)):
            return None
        m = empty(result_shape(&call, -1), <object> call.dtype)
        l = empty(result_shape(&call, -1), <object> call.dtype)
        o = empty(result_shape(&call, call.job.value_width), <object> call.dtype)
        bind_own(&call, &call.job.after.m, m, True)
        bind_own(&call, &call.job.after.l, l, True)
        bind_own(&call, &call.job.after.o, o, False)
        run_call(&call, run_attention, &call.job, threads)
        return m, l, o
    finally:
        close_batch(&call.batch)


cdef int take_textbook_mask(Call *call, mask) except -1:
    """0 = masked, of any numeric type, the same for every head."""
    if type(mask) is not ndarray:
        return 0
    if mask.dtype is not bool_:
        if mask.dtype.kind not in "biuf":
            return 0
        mask = mask != 0
    return take_mask_of(call, mask, 2)


def textbook(Q, K, V, d_k, mask, double fill, out, int threads):
    """Attention with scores / sqrt(d_k), where a masked key gets the score `fill` instead of being left out.

    Without `out`: Q (..., L, d), K, V without heads, and the result is (output, weights). With it: arrays
    (..., H, L, d), written to `out` of this shape, without weights. mask (..., L, S), 0 = masked, or "causal".
    None if Python must convert or explain.
    """
    cdef Call call
    cdef double number
    cdef bint causal = type(mask) is str and mask == "causal"
    open_call(&call, 2 if out is None else 3)
    try:
        if not (take_arrays(&call, Q, K, V) and take_number(d_k, &number) and 0 < number < INFINITY):
            return None
        if call.result != call.dtype:
            return None
        if mask is not None and not causal and not take_textbook_mask(&call, mask):
            return None
        if causal and call.job.queries != call.job.keys:
            return None
        call.job.structure.causal = call.job.structure.some = causal
        call.job.factor = (1.0 / sqrt(number)) * LOG2E
        if mask is not None:
            call.job.filling = True
            call.job.fill = fill * LOG2E
        if out is not None:
            if not take_out(&call, out):
                return None
            run_call(&call, run_attention, &call.job, threads)
            return out
        output = own_out(&call)
        weights = zeros(result_shape(&call, call.job.keys), <object> call.dtype)
        bind_own(&call, &call.job.weights, weights, False)
        run_call(&call, run_attention, &call.job, threads)
        return output, weights
    finally:
        close_batch(&call.batch)


cdef int take_scores(Call *call, scores, dict options, intervals, v) except -1:
    """Checked values: what the check above does not take is an error in scores.py.

    options, intervals: those of the scores, which the caller keeps alive.
    """
    if intervals is not None:
        call.given[INTERVALS] = <PyObject *> intervals
    if not take_call(call, scores.q, scores.k, v, options):
        raise SystemError("attentile: the core does not take what was checked; please report this call")
    return 0


cdef int take_output(Call *call, array) except -1:
    """That of outputs.py, in the dtype of the output or of the arithmetic."""
    if array is not None and array.dtype is <object> call.dtype:
        call.result = call.dtype
        call.job.out_format = own_format(&call.job)
    return take_result_in(call, &call.job.out, array, call.result, call.job.value_width)


cdef inline int take_result(Call *call, Strided *to, array, Py_ssize_t columns) except -1:
    """An array of outputs.py in the dtype of the arithmetic; columns -1: rows without columns."""
    return take_result_in(call, to, array, call.dtype, columns)


cdef int take_result_in(Call *call, Strided *to, array, PyObject *dtype, Py_ssize_t columns) except -1:
    cdef Py_buffer *view
    if array is None:                           # not asked for
        return 0
    view = borrow_result(call, array, dtype, columns)
    if view == NULL or view.readonly:
        raise SystemError("attentile: the core does not take the place for a result; please report this call")
    if columns < 0:
        bind_result_rows(call, to, view)
    else:
        bind_result(call, to, view)
    return 0


cdef int take_totals(Call *call, Strided *to, array) except -1:
    """Sums of rows, in double."""
    bind_result_rows(call, to, borrow(&call.batch, array))
    return 0


cdef int take_outputs(Call *call, outputs) except -1:
    cdef Job *job = &call.job
    take_output(call, outputs.out)
    take_result(call, &job.lse, outputs.lse, -1)
    take_result(call, &job.weights, outputs.weights, job.keys)
    if outputs.partial is not None:
        m, l, o = outputs.partial
        take_result(call, &job.after.m, m, -1)
        take_result(call, &job.after.l, l, -1)
        take_result(call, &job.after.o, o, job.value_width)
    if outputs.totals is not None:
        m, total = outputs.totals
        take_result(call, &job.after.m, m, -1)
        take_totals(call, &job.total, total)
    return 0


def attend(scores, v, outputs, int threads):
    """The pass over checked values, none of them empty: scores.py, v (..., Hkv, S, Dv), outputs.py."""
    cdef Call call
    cdef dict options = scores.options
    intervals = scores.intervals
    open_call(&call, 3)
    try:
        take_scores(&call, scores, options, intervals, v)
        take_outputs(&call, outputs)
        run_call(&call, run_attention, &call.job, threads)
    finally:
        close_batch(&call.batch)


cdef int take_statistics(Call *call, Stats *stats, found) except -1:
    """Where the statistics go; found: attributes by the names of Stats, None for what was not asked for."""
    cdef Batch *batch = &call.batch
    cdef Py_buffer *view
    cdef int tail = 2 if call.drop else 3
    if found.entropy is not None:
        take_result(call, &stats.entropy, found.entropy, -1)
    if found.largest is not None:
        take_result(call, &stats.largest, found.largest, -1)
    if found.received is not None:
        bind_rows(batch, &stats.received, borrow(batch, found.received), tail - 1)
    if found.top_weights is not None:
        view = borrow(batch, found.top_weights)
        stats.k = view.shape[view.ndim - 1]
        bind(batch, &stats.top_weights, view, tail)
        bind(batch, &stats.top_keys, borrow(batch, found.top_keys), tail)
    if found.rows is not None:
        bind(batch, &stats.rows, borrow(batch, found.rows), tail)
        stats.chosen = <const Py_ssize_t *> borrow(batch, found.chosen).buf
    return 0


def stats(scores, v, totals, found, int threads):
    """Second pass over checked values, none of them empty, with the Totals (outputs.py) that the first one left.

    found (inspection/stats.py): entropy, largest (..., Hq, L), received (..., Hq, S) in float64 and zeroed, top_weights
    zeroed and top_keys filled with -1 (..., Hq, L, k), rows (..., Hq, n, S) zeroed with chosen (L,): index into rows,
    or -1.
    """
    cdef Call call
    cdef Stats stats
    cdef dict options = scores.options
    intervals = scores.intervals
    open_call(&call, 3)
    memset(&stats, 0, sizeof(Stats))
    stats.job = &call.job
    try:
        take_scores(&call, scores, options, intervals, v)
        m, total = totals
        take_result(&call, &stats.m, m, -1)
        take_totals(&call, &stats.total, total)
        take_statistics(&call, &stats, found)
        run_call(&call, run_statistics, &stats, threads)
    finally:
        close_batch(&call.batch)


cdef int take_rows(Call *call, Strided *to, int *format, array, Py_ssize_t columns) except -1:
    """An array with the axes of the results, of any format; columns -1: rows without columns."""
    cdef Py_buffer *view
    if array is None:
        return 0
    format[0] = format_of(array.dtype, True)
    view = borrow_numbers(&call.batch, array, format[0]) if format[0] >= 0 else NULL
    if view == NULL or not has_result_shape(call, view, columns) or not is_aligned(view, view.itemsize):
        raise SystemError("attentile: the core does not take what was checked; please report this call")
    if columns < 0:
        bind_result_rows(call, to, view)
    else:
        bind_result(call, to, view)
    return 0


cdef int take_gradient(Call *call, Strided *to, int *format, array) except -1:
    """An array with the axes of keys or values, or of the bias."""
    if array is not None:
        format[0] = format_of(array.dtype, True)
        bind(&call.batch, to, borrow_numbers(&call.batch, array, format[0]), 2 if call.drop else call.tail)
    return 0


def backward(scores, v, given, wanted, int threads):
    """The gradients of attend() of these values: what the rows have, and where the gradients go, see backward.py."""
    cdef Call call
    cdef Backward back
    cdef int unused                             # formats that are those of the tiles
    cdef double[::1] slopes
    cdef dict options = scores.options
    intervals = scores.intervals
    open_call(&call, 3)
    memset(&back, 0, sizeof(Backward))
    back.job = &call.job
    back.scale = scores.scale
    try:
        take_scores(&call, scores, options, intervals, v)
        take_rows(&call, &back.dout, &back.dout_format, given.dout, call.job.value_width)
        take_rows(&call, &back.out, &back.o_format, given.out, call.job.value_width)
        take_rows(&call, &back.lse, &unused, given.lse, -1)
        take_rows(&call, &back.dlse, &unused, given.dlse, -1)
        take_rows(&call, &back.delta, &unused, wanted.delta, -1)
        take_rows(&call, &back.dq, &back.dq_format, wanted.dq, call.job.width)
        take_gradient(&call, &back.dk, &back.dk_format, wanted.dk)
        take_gradient(&call, &back.dv, &back.dv_format, wanted.dv)
        take_gradient(&call, &back.dbias, &unused, wanted.dbias)
        if wanted.dslopes is not None:
            slopes = wanted.dslopes
            back.dslopes = &slopes[0]
        run_call(&call, run_backward, &back, threads)
    finally:
        close_batch(&call.batch)


def explain(scores, v, out, bint with_weights, int threads):
    """Counts (_count.pxi), as a dict, of attend() of these values. out: where the output goes; None: a new array."""
    cdef Call call
    cdef Counting counting
    cdef at_tiles idle
    cdef dict options = scores.options
    intervals = scores.intervals
    open_call(&call, 3)
    memset(&counting, 0, sizeof(Counting))
    counting.job = &call.job
    try:
        take_scores(&call, scores, options, intervals, v)
        take_output(&call, out)
        if with_weights:                        # nothing is written there, so any address will do
            call.job.weights.data = <char *> &counting
        idle = at_idle_like(call.job.tiles)
        call.job.tiles = &idle
        run_call(&call, run_counting, &counting, threads)
        return counting.counts
    finally:
        close_batch(&call.batch)
