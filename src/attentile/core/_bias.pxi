# A bias in any floating format. Rows in the format of the tiles are read where they lie; rows in another one (a float64
# bias on float32 arrays, say) are converted into scratch as they are needed, never the whole array. Included by
# _core.pyx after _blocks.pxi.

cdef inline bint converts_bias(const Job *job) noexcept nogil:
    return job.bias.data != NULL and job.bias_format != (AT_F32 if job.tiles.itemsize == sizeof(float) else AT_F64)


cdef inline double bias_at(const Job *job, const char *p) noexcept nogil:
    """One element of the bias, of whatever format."""
    if job.bias_format == AT_F16:
        return at_float_of_f16((<const uint16_t *> p)[0])
    if job.bias_format == AT_BF16:
        return at_float_of_bf16((<const uint16_t *> p)[0])
    return real_at(p, sizeof(float) if job.bias_format == AT_F32 else sizeof(double))


cdef Py_ssize_t bring_bias(const Job *job, const Block *block, Shared *shared, Py_ssize_t key,
                           Py_ssize_t n) noexcept nogil:
    """shared.bias_rows: the bias of n keys from this one on, as tiles take it. Returns the bytes from key to key."""
    cdef Py_ssize_t r, item = <Py_ssize_t> job.tiles.itemsize, offset = key * job.bias.column
    cdef bint converts = converts_bias(job)
    cdef char *to = shared.bias
    for r in range(block.n_rows):
        if not converts:
            shared.bias_rows[r] = block.bias_rows[r] + offset
        elif r > 0 and block.bias_rows[r] == block.bias_rows[r - 1]:       # repeated for all rows
            shared.bias_rows[r] = shared.bias_rows[r - 1]
        else:
            job.tiles.convert(to, block.bias_rows[r] + offset, job.bias.column, n, job.bias_format)
            shared.bias_rows[r] = to
            to += AT_CHUNK * item
    return item if converts else job.bias.column
