# One call, from Python's values to a job: the check that says yes or no.
#
#     q, k, v   ─ take_arrays ─┐
#     options   ─ take_options ┼─▶ Call ─ run_call ─▶ the pass, once for each index of the batch axes that do not fold
#     results   ─ take_results ┘
#
# Every take_...() returns 1 if it could take what it was given as it is. 0 is no error: the value is one that Python
# must convert (another dtype, a strange stride, a NumPy scalar) or explain (nonsense); scores.py does either, and what
# it converts comes back here. So each rule of docs/semantics.md that decides a number stands here once, in the order in
# which a call meets them, and in Python only as the text of an error. Nothing is written before everything was taken.
#
# What a pass reads without the GIL can't change under it: arrays of numbers and integers are copied, as they are small.
# (The lengths of a cache are not: its guard, kernels/guard.h, lets nothing change it while it attends.)
#
# Included by _core.pyx after _arrays.pxi, _pass.pxi, _few.pxi and _stats.pxi.

# Options in the order in which they are looked at: structure and score changes first, then what depends on them.
cdef enum:
    SCALE
    SOFTCAP
    SINKS
    SLOPES
    CAUSAL
    WINDOW
    KEY_LENGTHS
    PREFIX_LENGTHS
    Q_START
    INTERVALS
    MASK
    BIAS
    BEFORE
    RETURN_LSE                                  # from here on: not of the scores
    DTYPE
    RETURN_WEIGHTS
    OUT
    NUM_THREADS
    OPTIONS

cdef dict NUMBERED = {
    "scale": SCALE, "softcap": SOFTCAP, "sinks": SINKS, "alibi_slopes": SLOPES, "causal": CAUSAL, "window": WINDOW,
    "key_lengths": KEY_LENGTHS, "prefix_lengths": PREFIX_LENGTHS, "q_start": Q_START, "mask": MASK, "bias": BIAS,
    "before": BEFORE, "dtype": DTYPE, "return_lse": RETURN_LSE, "return_weights": RETURN_WEIGHTS, "out": OUT,
    "num_threads": NUM_THREADS,
}

cdef enum:                                      # forms of causal
    NOT_CAUSAL
    PLAIN
    UPPER_LEFT
    LOWER_RIGHT

cdef struct Call:
    Job job
    Batch batch
    PyObject *dtype                             # of the arithmetic; NULL: none was found
    PyObject *result                            # of the output
    int tail                                    # axes of q, k and v behind the batch axes: 3, or 2 without heads
    bint drop                                   # q, k and v have no head axis, so the results have none
    PyObject *given[OPTIONS]                    # borrowed from the caller's dict; NULL: not there, or None
    int causal
    bint windowed                               # window= was given, even if it limits nothing
    bint limited                                # it limits something
    bint placed                                 # q_start= was given


cdef inline void open_call(Call *call, int tail) noexcept:
    memset(&call.job, 0, sizeof(Job))
    memset(call.given, 0, sizeof(call.given))
    open_batch(&call.batch)
    call.dtype = NULL
    call.result = NULL
    call.tail = tail
    call.drop = False
    call.causal = NOT_CAUSAL
    call.windowed = False
    call.limited = False
    call.placed = False


cdef int number_options(Call *call, dict options) except -1:
    """call.given from keyword arguments; 0 for a name that is not here."""
    cdef int x
    for name, value in options.items():
        place = NUMBERED.get(name)
        if place is None:
            return 0
        x = place
        if x == DTYPE and value is not None and not (type(value) is str and value == "bfloat16"):
            return 0
        if value is not None:
            call.given[x] = <PyObject *> value
        elif x == CAUSAL:                       # the one without a default of None
            return 0
    return 1


# ---------------------------------------------------------------------------------------------------------------
# Queries, keys, values
# ---------------------------------------------------------------------------------------------------------------
cdef object bfloat16 = None                     # the dtype of this name, once it was met: to ask for a name takes time


cdef int format_of(dtype, bint bits) except -2:
    """AT_F16 ..., or -1 for a dtype that tiles do not read. bits: uint16 holds bfloat16."""
    global bfloat16
    if dtype is float32:
        return AT_F32
    if dtype is float64:
        return AT_F64
    if dtype is float16:
        return AT_F16
    if bits and dtype is uint16:
        return AT_BF16
    if dtype is not bfloat16:
        if dtype.itemsize != 2 or dtype.name != "bfloat16":
            return -1
        bfloat16 = dtype
    return AT_BF16


cdef inline int format_in(const Call *call, array) except -2:
    """The same of an array, as dtype= says."""
    return format_of(array.dtype, call.given[DTYPE] != NULL) if type(array) is ndarray else -1


cdef inline int take_arithmetic(Call *call, bint is_double) except -1:
    """The element type that is computed in, and with it the tiles."""
    call.job.tiles = active.f64 if is_double else active.f32
    call.dtype = <PyObject *> (float64 if is_double else float32)
    call.job.out_format = own_format(&call.job)
    call.result = call.dtype
    return 1


cdef inline Py_buffer *borrow_direct(Call *call, array, int format, int axes) except? NULL:
    """The same of one with so many axes at least, that can be read as it is; else NULL."""
    cdef Py_buffer *view = borrow_numbers(&call.batch, array, format)
    if view.ndim < axes or is_empty(view) or not is_direct(view, AT_SIZE_OF(format)):
        return NULL
    return view


cdef int take_queries(Call *call, q) except -1:
    """q, of the format job.q_format."""
    cdef Job *job = &call.job
    cdef Py_buffer *view = borrow_direct(call, q, job.q_format, 2)
    if view == NULL or not widen_batch(&call.batch, view, call.tail):
        return 0
    job.queries = view.shape[view.ndim - 2]
    job.width = view.shape[view.ndim - 1]
    job.group = extent(view, 3) if call.tail == 3 else 1        # of all heads until there are keys
    return 1


cdef int take_formats(Call *call, q, k, v) except -1:
    """How each array is stored, what is computed in, and the dtype of the output: theirs, if they have one."""
    cdef Job *job = &call.job
    cdef int found
    job.q_format = format_in(call, q)
    job.k_format = format_in(call, k)
    job.v_format = format_in(call, v)
    if job.q_format < 0 or job.k_format < 0 or job.v_format < 0:
        return 0
    found = 1 << job.q_format | 1 << job.k_format | 1 << job.v_format
    take_arithmetic(call, found >> AT_F64 & 1)
    if job.q_format == job.k_format == job.v_format:
        call.result = <PyObject *> q.dtype
        job.out_format = job.q_format
    # NumPy has no common dtype of the two; next to bits, which it does not know, the result is float32.
    return call.given[DTYPE] != NULL or not (found >> AT_F16 & 1 and found >> AT_BF16 & 1)


cdef int take_arrays(Call *call, q, k, v) except -1:
    """q, k and v with everything that their dtypes and shapes decide."""
    cdef Job *job = &call.job
    cdef Py_buffer *queries = &call.batch.views[0]
    cdef Py_buffer *keys
    cdef Py_buffer *values
    if not take_formats(call, q, k, v) or not take_queries(call, q):
        return 0
    keys = borrow_direct(call, k, job.k_format, 2)
    if keys == NULL:
        return 0
    values = borrow_direct(call, v, job.v_format, 2)
    if values == NULL or not widen_batch(&call.batch, keys, call.tail):
        return 0
    if not widen_batch(&call.batch, values, call.tail):
        return 0
    call.drop = call.tail == 3 and queries.ndim == 2 and keys.ndim == 2 and values.ndim == 2
    job.keys = keys.shape[keys.ndim - 2]
    job.value_width = values.shape[values.ndim - 1]
    if (keys.shape[keys.ndim - 1] != job.width or values.shape[values.ndim - 2] != job.keys
            or (call.tail == 3 and extent(keys, 3) != extent(values, 3))):
        return 0
    bind(&call.batch, &job.q, queries, call.tail)
    bind(&call.batch, &job.k, keys, call.tail)
    bind(&call.batch, &job.v, values, call.tail)
    return settle_job(job, extent(keys, 3) if call.tail == 3 else 1)


cdef inline int settle_job(Job *job, Py_ssize_t kv_heads) except -1:
    """Heads, and what a job is without options."""
    if job.group % kv_heads != 0:
        return 0
    job.kv_heads = kv_heads
    job.group //= kv_heads
    job.factor = (1.0 / sqrt(<double> job.width)) * LOG2E
    job.fill = -INFINITY
    job.key_step = 1
    job.structure.left = FAR
    job.structure.right = FAR
    return 1


# ---------------------------------------------------------------------------------------------------------------
# Numbers
# ---------------------------------------------------------------------------------------------------------------
cdef inline double largest_number(const Call *call) noexcept:
    return <double> FLT_MAX if call.job.tiles.itemsize == sizeof(float) else DBL_MAX


cdef inline int take_number(value, double *to) except -1:
    """A Python number. NumPy's float64 is one; other kinds are for Python, which knows what is a number."""
    if isinstance(value, float):
        to[0] = value
        return 1
    if type(value) is int and -(1 << 52) < value < 1 << 52:
        to[0] = <double> <Py_ssize_t> value
        return 1
    return 0


cdef int take_scale(Call *call, value) except -1:
    """It is multiplied by log2 e, and that must fit the arithmetic."""
    cdef double scale
    if not take_number(value, &scale) or not fabs(scale) <= largest_number(call) / LOG2E:
        return 0
    call.job.factor = scale * LOG2E
    return 1


cdef int take_softcap(Call *call, value) except -1:
    """Beyond a quarter of the range no score that fits changes by a bit; the smallest normal number is for 2 / cap."""
    cdef double cap, largest = largest_number(call)
    if not take_number(value, &cap) or not 0 < cap < INFINITY:
        return 0
    call.job.softcap = min(max(cap, <double> FLT_MIN if largest == FLT_MAX else DBL_MIN), largest / 4)
    return 1


cdef const double *take_per_head(Call *call, value) except? NULL:
    """One number per query head, copied; NULL if it is something else."""
    cdef Py_buffer *view
    if type(value) is not ndarray or (value.dtype is not float64 and value.dtype is not float32) or value.ndim != 1:
        return NULL
    view = borrow(&call.batch, array_of(value, float64))
    if view.shape[0] != call.job.kv_heads * call.job.group:
        return NULL
    return <const double *> view.buf


cdef int take_sinks(Call *call, value) except -1:
    call.job.sinks = take_per_head(call, value)
    return call.job.sinks != NULL


cdef int take_slopes(Call *call, value) except -1:
    cdef Py_ssize_t h
    cdef double largest = largest_number(call)
    cdef const double *slopes = take_per_head(call, value)
    if slopes == NULL:
        return 0
    for h in range(call.job.kv_heads * call.job.group):
        if fabs(slopes[h]) > largest:
            return 0
    call.job.slopes = slopes
    return 1


# ---------------------------------------------------------------------------------------------------------------
# Structure: which keys a query sees by its position
# ---------------------------------------------------------------------------------------------------------------
cdef int take_causal(Call *call, value) except -1:
    if value is False:
        return 1
    if value is True:
        call.causal = PLAIN
    elif type(value) is str and value == "upper_left":
        call.causal = UPPER_LEFT
    elif type(value) is str and value == "lower_right":
        call.causal = LOWER_RIGHT
    else:
        return 0
    call.job.structure.causal = True
    return 1


cdef inline int take_side(value, Py_ssize_t *to) except -1:
    if value is None:
        return 1
    if type(value) is not int or not 0 <= value <= FAR:
        return 0
    to[0] = value
    return 1


cdef int take_window(Call *call, value) except -1:
    cdef Structure *structure = &call.job.structure
    if type(value) is not tuple or len(<tuple> value) != 2:
        return 0
    left, right = <tuple> value
    call.windowed = True
    call.limited = left is not None or right is not None
    return take_side(left, &structure.left) and take_side(right, &structure.right)


cdef int take_index(Call *call, value, Index *to, Py_ssize_t least, Py_ssize_t most) except -1:
    """An integer or one per batch item, all within the bounds, as a copy of its own."""
    cdef Py_buffer *view
    cdef const Py_ssize_t *numbers
    cdef Py_ssize_t i, n = 1
    cdef int a
    if type(value) is ndarray:
        if value.dtype.kind != "i" or not value.dtype.isnative:
            return 0
        value = array_of(value, intp, order="C")
    elif type(value) is int or type(value) is list or type(value) is tuple or isinstance(value, integer):
        value = array_of(value)
        if value.dtype is not intp:
            return 0
    else:
        return 0
    view = borrow(&call.batch, value)
    if not fits_batch(&call.batch, view, 0):
        return 0
    for a in range(view.ndim):
        n *= view.shape[a]
    numbers = <const Py_ssize_t *> view.buf
    for i in range(n):
        if not least <= numbers[i] <= most:
            return 0
    join_batch(&call.batch, &to.data, &to.batch, view, 0)
    return 1


cdef int take_key_lengths(Call *call, value) except -1:
    return take_index(call, value, &call.job.structure.lengths, 0, call.job.keys)


cdef int take_prefix_lengths(Call *call, value) except -1:
    return take_index(call, value, &call.job.structure.prefixes, 0, PY_SSIZE_T_MAX)


cdef int take_q_start(Call *call, value) except -1:
    call.placed = True
    return take_index(call, value, &call.job.structure.first, -PY_SSIZE_T_MAX, PY_SSIZE_T_MAX)


cdef int take_intervals(Call *call, value) except -1:
    """(lo, hi), intp (..., L), from scores.py, which has made them for packed segments."""
    cdef Py_buffer *view
    cdef Structure *structure = &call.job.structure
    cdef int side
    for side in range(2):
        view = borrow(&call.batch, (<tuple> value)[side])
        bind_rows(&call.batch, &structure.hi if side else &structure.lo, view, 1)
    return 1


cdef int place_queries(Call *call) except -1:
    """Where the queries stand, and whether that is clear (docs/semantics.md, S7 and S7b)."""
    cdef Job *job = &call.job
    cdef Structure *structure = &job.structure
    cdef bint asked = call.limited or job.slopes != NULL
    if structure.prefixes.data != NULL and call.causal == NOT_CAUSAL:
        return 0
    if call.placed:
        if call.causal > PLAIN or (call.causal == NOT_CAUSAL and not call.windowed and job.slopes == NULL):
            return 0
    elif call.causal == LOWER_RIGHT:
        structure.from_end = True
    elif (call.causal == PLAIN or (asked and call.causal == NOT_CAUSAL)) and job.queries != job.keys:
        return 0
    structure.some = (call.causal != NOT_CAUSAL or call.limited or structure.lengths.data != NULL
                      or structure.lo.data != NULL)
    return 1


# ---------------------------------------------------------------------------------------------------------------
# Arrays of the size of the scores
# ---------------------------------------------------------------------------------------------------------------
cdef bint fits_scores(const Call *call, const Py_buffer *view, int tail) noexcept:
    """Whether an array broadcasts to the scores (..., Hq, L, S); tail 2: to (..., L, S), the same for all heads."""
    cdef const Job *job = &call.job
    cdef Py_ssize_t heads = job.kv_heads * job.group
    if extent(view, 1) not in (1, job.keys) or extent(view, 2) not in (1, job.queries):
        return False
    if tail == 3 and extent(view, 3) not in (1, heads):
        return False
    return fits_batch(&call.batch, view, tail)


cdef int take_mask(Call *call, value) except -1:
    return take_mask_of(call, value, call.tail)


cdef int take_mask_of(Call *call, value, int tail) except -1:
    cdef Job *job = &call.job
    cdef Py_buffer *view
    if type(value) is not ndarray or value.dtype is not bool_:
        return 0
    view = borrow(&call.batch, value)
    if not fits_scores(call, view, tail):
        return 0
    bind(&call.batch, &job.mask, view, tail)
    job.structure.mask_in_rows = job.mask.head == 0 and job.mask.row == 0
    return 1


cdef int take_bias(Call *call, value) except -1:
    cdef Py_buffer *view
    cdef int format = format_in(call, value)
    if format < 0:
        return 0
    view = borrow_numbers(&call.batch, value, format)
    if not is_aligned(view, view.itemsize) or not fits_scores(call, view, call.tail):
        return 0
    bind(&call.batch, &call.job.bias, view, call.tail)
    call.job.bias_format = format
    return 1


cdef int take_before(Call *call, value) except -1:
    """(m, l, o) of the same rows over other keys; see partial.py."""
    cdef Py_ssize_t part
    cdef Py_buffer *view
    cdef Partial *before = &call.job.before
    if not isinstance(value, tuple) or getattr(value, "_fields", None) != ("m", "l", "o"):
        return 0
    for part in range(3):
        view = borrow_result(call, (<tuple> value)[part], call.dtype, call.job.value_width if part == 2 else -1)
        if view == NULL:
            return 0
        if part == 0:
            bind_result_rows(call, &before.m, view)
        elif part == 1:
            bind_result_rows(call, &before.l, view)
        else:
            bind_result(call, &before.o, view)
    return 1


# ---------------------------------------------------------------------------------------------------------------
# All options
# ---------------------------------------------------------------------------------------------------------------
ctypedef int (*Taker)(Call *call, value) except -1

cdef Taker TAKERS[RETURN_LSE]
TAKERS[SCALE] = take_scale
TAKERS[SOFTCAP] = take_softcap
TAKERS[SINKS] = take_sinks
TAKERS[SLOPES] = take_slopes
TAKERS[CAUSAL] = take_causal
TAKERS[WINDOW] = take_window
TAKERS[KEY_LENGTHS] = take_key_lengths
TAKERS[PREFIX_LENGTHS] = take_prefix_lengths
TAKERS[Q_START] = take_q_start
TAKERS[INTERVALS] = take_intervals
TAKERS[MASK] = take_mask
TAKERS[BIAS] = take_bias
TAKERS[BEFORE] = take_before


cdef int take_options(Call *call) except -1:
    """Everything that decides the scores, apart from queries and keys."""
    cdef int x
    for x in range(RETURN_LSE):
        if call.given[x] != NULL and not TAKERS[x](call, <object> call.given[x]):
            return 0
    return 1
