# Calls with float16 or bfloat16 arrays: computed in float32, rounded once. Included by _core.pyx after _door.pxi.

cdef int convert(source, target, bint narrow, bint brain) except -1:
    """Elements of one array in the format of the other; 0 if they are not one run of memory in the same order.

    source and target have the same shape, one of them float32 and the other, for 16 bits, any type of two bytes that
    has a buffer. brain: the 16 bits are a bfloat16.
    """
    cdef Py_buffer from_view, to_view
    cdef Py_ssize_t n = 1
    cdef int a, same = 1
    PyObject_GetBuffer(source, &from_view, PyBUF_STRIDES)
    try:
        PyObject_GetBuffer(target, &to_view, PyBUF_STRIDES)
        try:
            for a in range(from_view.ndim):
                n *= from_view.shape[a]
                if from_view.shape[a] > 1 and (to_view.strides[a] * from_view.itemsize
                                               != from_view.strides[a] * to_view.itemsize or to_view.strides[a] < 0):
                    same = 0
            if not same or (<Py_ssize_t> from_view.buf & (from_view.itemsize - 1)):
                return 0
            if narrow and brain:
                at_narrow_bf16(<uint16_t *> to_view.buf, <const float *> from_view.buf, n)
            elif narrow:
                at_narrow_f16(<uint16_t *> to_view.buf, <const float *> from_view.buf, n)
            elif brain:
                at_widen_bf16(<float *> to_view.buf, <const uint16_t *> from_view.buf, n)
            else:
                at_widen_f16(<float *> to_view.buf, <const uint16_t *> from_view.buf, n)
        finally:
            PyBuffer_Release(&to_view)
    finally:
        PyBuffer_Release(&from_view)
    return 1


cdef object widened(array, bint brain):
    """A new array in float32 with the order of axes of this one, or None."""
    single = empty_like(array, float32)
    return single if convert(array.view(uint16) if brain else array, single, False, brain) else None


cdef object narrowed(single, dtype, bint brain):
    """A new array of this dtype from a contiguous one in float32."""
    half = empty(single.shape, dtype)
    convert(single, half.view(uint16) if brain else half, True, brain)
    return half


cdef object half_results(q, k, v, dict options, int threads):
    """attention() for three arrays of one 16-bit type, or None."""
    if type(q) is not ndarray or type(k) is not ndarray or type(v) is not ndarray or options.get("out") is not None:
        return None
    dtype = q.dtype
    if k.dtype is not dtype or v.dtype is not dtype:
        return None
    cdef int format = format_of(dtype)
    if format != AT_F16 and format != AT_BF16:
        return None
    cdef bint brain = format == AT_BF16
    q = widened(q, brain)
    k = widened(k, brain)
    v = widened(v, brain)
    if q is None or k is None or v is None:
        return None
    found = attention(q, k, v, options, threads)
    if type(found) is tuple:
        out, lse, weights = found
        return narrowed(out, dtype, brain), lse, None if weights is None else narrowed(weights, dtype, brain)
    return None if found is None else narrowed(found, dtype, brain)
