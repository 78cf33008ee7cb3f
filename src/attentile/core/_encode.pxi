# The sinusoidal positional encoding (Vaswani et al. 2017, section 3.5), row by row. Included by _core.pyx.
#
#     out[i][2 x]     = sin((first + i) * ratio^x)       x < ceil(columns / 2); an odd number of columns
#     out[i][2 x + 1] = cos((first + i) * ratio^x)       ends with a sine
#
# Sines are computed for 64 + rows / 64 rows, see _angles.pxi; the rest is one pass at the speed of the stores.

cdef struct Encoding:
    const at_angles *angles
    char *out
    Py_ssize_t row_stride, item_bytes           # bytes
    Py_ssize_t rows, columns
    int64_t first                               # position of row 0
    double *high                                # [whole blocks of pairs] quarter turns per position
    double *low
    double *cosines                             # [pitch] the rotation by one 64 a
    double *sines
    double *fine                                # [FINE_ROWS][pitch]
    Py_ssize_t pitch


cdef inline Py_ssize_t pairs_of(Py_ssize_t columns) noexcept nogil:
    return whole_blocks(columns // 2 + columns % 2)


cdef void encode_strip(const Encoding *job, Py_ssize_t column) noexcept nogil:
    """Every row from this column to the end of the strip."""
    cdef Py_ssize_t width = min(job.columns - column, <Py_ssize_t> (2 * STRIP_PAIRS)), i
    cdef const double *high = job.high + column // 2
    cdef const double *low = job.low + column // 2
    cdef const double *fine
    cdef char *row
    cdef int64_t b
    for b in range(FINE_ROWS):
        if fine_row(b - job.first) < job.rows:  # short calls meet only some b
            job.angles.sincos(NULL, job.fine + b * job.pitch, <double> b, high, low, pairs_of(width), AT_ALTERNATING)
    for i in range(job.rows):
        b = fine_row(job.first + i)
        if i == 0 or b == 0:
            job.angles.sincos(job.cosines, job.sines, <double> (job.first + i - b), high, low, pairs_of(width),
                              AT_ROTATION)
        row = job.out + i * job.row_stride + column * job.item_bytes
        fine = job.fine + b * job.pitch
        if job.item_bytes == sizeof(float):
            job.angles.rotate_f32(<float *> row, job.cosines, job.sines, fine, width)
        else:
            job.angles.rotate(<double *> row, job.cosines, job.sines, fine, width)


cdef int run_encoding(Encoding *job, double ratio_high, double ratio_low) except -1 nogil:
    """Finds scratch, runs strip after strip."""
    cdef Py_ssize_t pairs = pairs_of(job.columns), column = 0
    job.pitch = 2 * min(pairs, <Py_ssize_t> STRIP_PAIRS)
    job.high = <double *> at_scratch((2 * pairs + (2 + FINE_ROWS) * job.pitch) * sizeof(double))
    if job.high == NULL:
        with gil:
            raise MemoryError("attentile: no memory for the tables of the positional encoding")
    job.low = job.high + pairs
    job.cosines = job.low + pairs
    job.sines = job.cosines + job.pitch
    job.fine = job.sines + job.pitch
    job.angles.frequencies(job.high, job.low, pairs, ratio_high, ratio_low)
    while column < job.columns:
        encode_strip(job, column)
        column += 2 * STRIP_PAIRS
    return 0


def encode(out, double first_position, double ratio_high, double ratio_low):
    """Sinusoids of positions first_position, first_position + 1, ... into non-empty out (rows, d_model), float32 or
    float64 with the last axis contiguous. Positions are whole and at most 2^50; ratio = base^(-2 / d_model)."""
    cdef float[:, :] single
    cdef double[:, :] double_
    cdef Encoding job
    memset(&job, 0, sizeof(Encoding))
    job.angles, job.first = active.angles, <int64_t> first_position
    job.rows, job.columns = out.shape[0], out.shape[1]
    job.item_bytes = out.itemsize
    if job.item_bytes == sizeof(float):
        single = out
        job.out, job.row_stride = <char *> &single[0, 0], single.strides[0]
    else:
        double_ = out
        job.out, job.row_stride = <char *> &double_[0, 0], double_.strides[0]
    with nogil:
        run_encoding(&job, ratio_high, ratio_low)
