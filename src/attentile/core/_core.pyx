"""The compiled core: entry functions over typed memoryviews, the choice of an instruction set, measurements.

The pass itself is in _pass.pxi and _blocks.pxi (one Cython module, because each one with memoryviews costs 25,000
generated lines).
"""
from libc.math cimport INFINITY, NAN, isfinite, sqrt
from libc.stdint cimport int64_t, uint32_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from ._kernels cimport (AT_ALIGN, AT_ANGLE_BLOCK, AT_CHUNK, AT_FEW_KEYS, AT_MAX_ROWS, AT_PANEL, AT_PEAK_FMAS,
                        AT_WORD, LN2, LOG2E, at_ahead, at_angles, at_exp2, at_isa, at_isa_at, at_isa_count,
                        at_isa_supported, at_log2, at_mask_words, at_pool_run, at_pool_workers, at_rotary_rows,
                        at_scratch, at_tiles)

import numpy

include "_blocks.pxi"
include "_pass.pxi"
include "_few.pxi"
include "_stats.pxi"

# ---------------------------------------------------------------------------------------------------------------
# Entry: typed memoryviews in, a job out
# ---------------------------------------------------------------------------------------------------------------
ctypedef fused real:
    float
    double

cdef extern from *:
    """
    #if defined(__clang__)
    #define AT_COMPILER "clang " __clang_version__
    #elif defined(__GNUC__)
    #define AT_COMPILER "gcc " __VERSION__
    #else
    #define AT_COMPILER "unknown"
    #endif
    """
    const char *COMPILER "AT_COMPILER"

cdef const at_isa *active = NULL
cdef object ndarray = numpy.ndarray
cdef object empty = numpy.empty
cdef object float32 = numpy.dtype(numpy.float32)
cdef object float64 = numpy.dtype(numpy.float64)


cdef inline void bind(Strided *to, const void *data, Py_ssize_t *strides) noexcept nogil:
    to.data = <char *> data
    to.batch, to.head, to.row, to.column = strides[0], strides[1], strides[2], strides[3]


cdef inline void bind_rows(Strided *to, const void *data, Py_ssize_t *strides) noexcept nogil:
    to.data = <char *> data
    to.batch, to.head, to.row, to.column = strides[0], strides[1], strides[2], 0


cdef int run_job(Job *job, double scale, int threads) except -1 nogil:
    """Divides the work, finds scratch for it, runs it."""
    cdef Py_ssize_t heads = job.batch * job.kv_heads, rows = job.group * job.queries, nbytes
    job.factor = scale * LOG2E
    threads = divide(job, threads)
    # In floating point: a view may repeat one key 2^60 times.
    job.fetch = (<double> (rows + job.keys) * heads * (job.width + job.value_width) * job.tiles.itemsize
                 > (FEW_FETCH_BYTES if job.few else FETCH_BYTES))
    size_scratch(job)
    nbytes = threads * job.scratch_per_slot + heads * job.partials_per_head * job.partial_bytes
    job.scratch = <char *> scratch_of(nbytes)
    if not job.few:
        at_pool_run(attend_task, job, job.tasks, threads)
        return 0
    job.partials = job.scratch + threads * job.scratch_per_slot
    at_pool_run(few_task, job, job.tasks, threads)
    if job.parts > 1:                           # a few microseconds even for long caches
        at_pool_run(merge_task, job, heads, 1)
    return 0


cdef inline void start_job(Job *job, size_t itemsize, const void *q, Py_ssize_t *q_shape, Py_ssize_t *q_strides,
                           Py_ssize_t kv_heads, Py_ssize_t keys) noexcept nogil:
    """A job with queries, the number of keys and nothing else."""
    memset(job, 0, sizeof(Job))
    job.tiles = active.f32 if itemsize == sizeof(float) else active.f64
    job.batch, job.kv_heads, job.group = q_shape[0], kv_heads, q_shape[1] // kv_heads
    job.queries, job.keys, job.width = q_shape[2], keys, q_shape[3]
    job.fill = -INFINITY
    job.key_step = 1
    bind(&job.q, q, q_strides)


cdef int describe(Job *job, const real[:, :, :, :] q, const real[:, :, :, :] k, const unsigned char[:, :, :, :] mask,
                  const real[:, :, :, :] bias, const Py_ssize_t[:, ::1] lo, const Py_ssize_t[:, ::1] hi, double softcap,
                  const double[::1] slopes, const Py_ssize_t[::1] start) except -1:
    """Everything that decides the scores, with the keys in an array."""
    start_job(job, sizeof(real), &q[0, 0, 0, 0], q.shape, q.strides, k.shape[1], k.shape[2])
    bind(&job.k, &k[0, 0, 0, 0], k.strides)
    return describe_scores[real](job, mask, bias, lo, hi, softcap, slopes, start)


cdef int describe_scores(Job *job, const unsigned char[:, :, :, :] mask, const real[:, :, :, :] bias,
                         const Py_ssize_t[:, ::1] lo, const Py_ssize_t[:, ::1] hi, double softcap,
                         const double[::1] slopes, const Py_ssize_t[::1] start) except -1:
    """Masks and score changes of a job with queries and keys."""
    if mask is not None:
        bind(&job.mask, &mask[0, 0, 0, 0], mask.strides)
    if bias is not None:
        bind(&job.bias, &bias[0, 0, 0, 0], bias.strides)
    if lo is not None:
        job.lo, job.hi = &lo[0, 0], &hi[0, 0]
        job.interval_batch = lo.shape[1] if lo.shape[0] > 1 else 0
    if slopes is not None:
        job.slopes, job.start, job.start_batch = &slopes[0], &start[0], start.shape[0] > 1
    job.softcap = softcap
    return 0


cdef int attend_typed(Job *job, real[:, :, :, :] out, double scale, int threads, real[:, :, :] lse,
                      real[:, :, :, :] weights, fill, const double[::1] sinks) except -1:
    """Runs a described job with results and what does not concern the scores."""
    bind(&job.out, &out[0, 0, 0, 0], out.strides)
    if weights is not None:
        bind(&job.weights, &weights[0, 0, 0, 0], weights.strides)
    if lse is not None:
        bind_rows(&job.lse, &lse[0, 0, 0], lse.strides)
    if sinks is not None:
        job.sinks = &sinks[0]
    if fill is not None:
        job.filling, job.fill = True, fill * LOG2E
    with nogil:
        run_job(job, scale, threads)
    return 0


cdef int attend_arrays(const real[:, :, :, :] q, const real[:, :, :, :] k, const real[:, :, :, :] v,
                       real[:, :, :, :] out, double scale, int threads, const unsigned char[:, :, :, :] mask,
                       const real[:, :, :, :] bias, const Py_ssize_t[:, ::1] lo, const Py_ssize_t[:, ::1] hi,
                       real[:, :, :] lse, real[:, :, :, :] weights, fill, double softcap, const double[::1] sinks,
                       const double[::1] slopes, const Py_ssize_t[::1] start, real[:, :, :, ::1] state) except -1:
    cdef Job job
    describe[real](&job, q, k, mask, bias, lo, hi, softcap, slopes, start)
    if state is not None:
        bind(&job.state, &state[0, 0, 0, 0], state.strides)
    job.value_width = v.shape[3]
    bind(&job.v, &v[0, 0, 0, 0], v.strides)
    return attend_typed[real](&job, out, scale, threads, lse, weights, fill, sinks)


def attend(q, k, v, out, double scale, int threads, *, mask=None, bias=None, lo=None, hi=None, lse=None, weights=None,
           fill=None, double softcap=0, sinks=None, slopes=None, start=None, state=None):
    """The pass over non-empty 4-D arrays of one dtype (see attention.py, which checks and normalises).

    q (B, Hq, L, D), k (B, Hkv, S, D), v (B, Hkv, S, Dv), out (B, Hq, L, Dv): last axis contiguous, aligned, native.
    mask (B, Hq, L, S) uint8, bias (B, Hq, L, S): any strides. lo, hi (1 or B, L) intp with 0 <= lo, hi <= S.
    lse (B, Hq, L), weights (B, Hq, L, S) zeroed. fill: score of masked keys instead of their exclusion.
    softcap: 0 for none. sinks, slopes (Hq,) float64. start (1 or B,) intp: position of query 0, needed by slopes.
    state (B, Hq, L, 2), last axis contiguous: gets what stats() needs of each row, its largest score m, in the unit of
    this core, and the sum l of exp(score - m), with the sink.
    """
    if out.itemsize == 4:
        attend_arrays[float](q, k, v, out, scale, threads, mask, bias, lo, hi, lse, weights, fill, softcap, sinks,
                             slopes, start, state)
    else:
        attend_arrays[double](q, k, v, out, scale, threads, mask, bias, lo, hi, lse, weights, fill, softcap, sinks,
                              slopes, start, state)


cdef int stats_typed(const real[:, :, :, :] q, const real[:, :, :, :] k, double scale, int threads,
                     const unsigned char[:, :, :, :] mask, const real[:, :, :, :] bias, const Py_ssize_t[:, ::1] lo,
                     const Py_ssize_t[:, ::1] hi, double softcap, const double[::1] slopes, const Py_ssize_t[::1] start,
                     const real[:, :, :, ::1] state, real[:, :, :] entropy, real[:, :, :] largest,
                     real[:, :, :] received, real[:, :, :, ::1] top_weights, Py_ssize_t[:, :, :, ::1] top_keys,
                     real[:, :, :, ::1] rows, const Py_ssize_t[::1] chosen) except -1:
    cdef Job job
    cdef Stats stats
    describe(&job, q, k, mask, bias, lo, hi, softcap, slopes, start)
    memset(&stats, 0, sizeof(Stats))
    stats.job = &job
    bind(&stats.state, &state[0, 0, 0, 0], state.strides)
    if entropy is not None:
        bind_rows(&stats.entropy, &entropy[0, 0, 0], entropy.strides)
    if largest is not None:
        bind_rows(&stats.largest, &largest[0, 0, 0], largest.strides)
    if received is not None:
        bind_rows(&stats.received, &received[0, 0, 0], received.strides)
    if top_weights is not None:
        stats.k = top_weights.shape[3]
        bind(&stats.top_weights, &top_weights[0, 0, 0, 0], top_weights.strides)
        bind(&stats.top_keys, &top_keys[0, 0, 0, 0], top_keys.strides)
    if rows is not None:
        bind(&stats.rows, &rows[0, 0, 0, 0], rows.strides)
        stats.chosen = &chosen[0]
    with nogil:
        run_stats(&stats, scale, threads)
    return 0


def stats(q, k, state, double scale, int threads, *, mask=None, bias=None, lo=None, hi=None, double softcap=0,
          slopes=None, start=None, entropy=None, largest=None, received=None, top_weights=None, top_keys=None,
          rows=None, chosen=None):
    """Second pass over non-empty arrays as attend() takes them, with the state of the first (see inspection/stats.py).

    entropy, largest (B, Hq, L), received (B, Hq, S) zeroed, top_weights zeroed and top_keys filled with -1
    (B, Hq, L, k), rows (B, Hq, n, S) zeroed with chosen (L,): index into rows, or -1.
    """
    if state.itemsize == 4:
        stats_typed[float](q, k, scale, threads, mask, bias, lo, hi, softcap, slopes, start, state, entropy, largest,
                           received, top_weights, top_keys, rows, chosen)
    else:
        stats_typed[double](q, k, scale, threads, mask, bias, lo, hi, softcap, slopes, start, state, entropy, largest,
                            received, top_weights, top_keys, rows, chosen)


cdef inline bint is_direct(const real[:, :, :, :] a) noexcept nogil:
    """Whether a non-empty array can be read as it is: last axis contiguous, every row aligned to its elements."""
    cdef Py_ssize_t item = sizeof(real)
    if a.strides[3] != item and a.shape[3] > 1:
        return False
    return ((<Py_ssize_t> &a[0, 0, 0, 0] | a.strides[0] | a.strides[1] | a.strides[2]) & (item - 1)) == 0


cdef object attend_plain_typed(const real[:, :, :, :] q, const real[:, :, :, :] k, const real[:, :, :, :] v, dtype,
                               scale, int threads):
    cdef Py_ssize_t heads = k.shape[1]
    cdef real[:, :, :, :] out
    cdef Job job
    if (q.shape[0] != k.shape[0] or k.shape[0] != v.shape[0] or heads != v.shape[1] or k.shape[2] != v.shape[2]
            or q.shape[3] != k.shape[3] or heads == 0 or q.shape[1] % heads != 0
            or q.shape[0] * q.shape[1] * q.shape[2] * q.shape[3] == 0 or k.shape[2] * v.shape[3] == 0):
        return None
    if not (is_direct(q) and is_direct(k) and is_direct(v)):
        return None
    result = empty((q.shape[0], q.shape[1], q.shape[2], v.shape[3]), dtype)
    out = result
    start_job(&job, sizeof(real), &q[0, 0, 0, 0], q.shape, q.strides, heads, k.shape[2])
    bind(&job.k, &k[0, 0, 0, 0], k.strides)
    job.value_width = v.shape[3]
    bind(&job.v, &v[0, 0, 0, 0], v.strides)
    bind(&job.out, &out[0, 0, 0, 0], out.strides)
    cdef double factor = (1.0 / sqrt(<double> job.width)) if scale is None else scale
    with nogil:
        run_job(&job, factor, threads)
    return result


def attend_plain(q, k, v, scale, int threads):
    """attend() for the commonest call, with its checks: the output, or None if the general way must decide.

    Dense attention of three native arrays (B, H, L, D) of one dtype; this keeps a tiny call at about a microsecond.
    """
    if type(q) is not ndarray or type(k) is not ndarray or type(v) is not ndarray:
        return None
    dtype = q.dtype
    if k.dtype is not dtype or v.dtype is not dtype or q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        return None
    if scale is not None and (type(scale) is not float or not isfinite(<float> (<double> scale * LOG2E))):
        return None                             # float64 has more room: the general way sees to it
    if dtype is float32:
        return attend_plain_typed[float](q, k, v, dtype, scale, threads)
    if dtype is float64:
        return attend_plain_typed[double](q, k, v, dtype, scale, threads)
    return None


include "_cache.pxi"
include "_angles.pxi"
include "_encode.pxi"
include "_rotary.pxi"

# ---------------------------------------------------------------------------------------------------------------
# Instruction sets and measurements
# ---------------------------------------------------------------------------------------------------------------
def isas():
    """{name: supported here} of every instruction set of this build, best first."""
    return {at_isa_at(x).name.decode(): bool(at_isa_supported(x)) for x in range(at_isa_count())}


def set_isa(str name):
    """Uses the tiles of this instruction set from now on; ValueError if the build or the processor lacks it."""
    global active
    for x in range(at_isa_count()):
        if at_isa_at(x).name.decode() == name and at_isa_supported(x):
            active = at_isa_at(x)
            return
    here = ", ".join(isa for isa, supported in isas().items() if supported)
    raise ValueError(f"attentile: instruction set {name!r} is not available here; this machine and build have {here}")


def get_isa():
    """The name of the instruction set in use."""
    return active.name.decode()


def fma_rounds(int itemsize, Py_ssize_t rounds):
    """Runs `rounds` rounds of independent FMAs and returns their number of FLOPs; time it to get the peak."""
    cdef const at_tiles *tiles = active.f32 if itemsize == 4 else active.f64
    with nogil:
        tiles.fma_peak(rounds)
    return 2.0 * tiles.lanes * AT_PEAK_FMAS * rounds


cdef struct Reading:
    const at_tiles *tiles
    const float *data
    Py_ssize_t n, slice_


cdef void read_slice(void *reading_pointer, Py_ssize_t index, int slot) noexcept nogil:
    cdef const Reading *reading = <const Reading *> reading_pointer
    cdef Py_ssize_t first = index * reading.slice_
    reading.tiles.read(reading.data + first, min(reading.slice_, reading.n - first))


def read_plainly(const float[::1] data, int threads):
    """Reads an array as the pass reads keys and values, in tasks of 64 KiB; time it to get the bandwidth."""
    cdef Reading reading
    reading.tiles, reading.data, reading.n, reading.slice_ = active.f32, &data[0], data.shape[0], 1 << 14
    with nogil:
        at_pool_run(read_slice, &reading, (reading.n + reading.slice_ - 1) // reading.slice_, threads)


def plan(Py_ssize_t batch, Py_ssize_t heads, Py_ssize_t kv_heads, Py_ssize_t queries, Py_ssize_t keys, Py_ssize_t width,
         Py_ssize_t value_width, int itemsize, int threads, bint weights, bint filling):
    """How attend() divides a call with such shapes: a dict of lanes, few, block_rows, tasks and threads."""
    cdef Job job
    memset(&job, 0, sizeof(Job))
    job.tiles = active.f32 if itemsize == 4 else active.f64
    job.batch, job.kv_heads, job.group, job.queries, job.keys = batch, kv_heads, heads // kv_heads, queries, keys
    job.width, job.value_width, job.filling = width, value_width, filling
    job.weights.data = <char *> &job if weights else NULL
    threads = divide(&job, threads)
    return {"lanes": job.tiles.lanes, "few": bool(job.few), "block_rows": job.block_rows, "tasks": job.tasks,
            "threads": threads}


def constants():
    """The numbers of kernels.h that constants.py repeats, by their names there."""
    return {"ALIGN": AT_ALIGN, "CHUNK": AT_CHUNK, "LOG2E": LOG2E, "PANEL": AT_PANEL, "WORD": AT_WORD}


def compiler():
    """The compiler that built the core."""
    return COMPILER.decode()


def pool_workers():
    """Number of worker threads started so far in this process."""
    return at_pool_workers()


set_isa(next(isa for isa, supported in isas().items() if supported))
