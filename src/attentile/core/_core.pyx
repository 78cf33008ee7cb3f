"""The compiled core: one Cython module (each one with memoryviews costs 25,000 generated lines), read in this order:

    _job.pxi      what a job is, and a block of rows
    _blocks.pxi   the division of a job into tasks and blocks, scratch
    _bias.pxi     a bias of any format, as the tiles take it
    _storage.pxi  the same for queries, keys, values and the output
    _pass.pxi     the fused pass: the loop over chunks of keys. The story is told there
    _few.pxi      the same for few rows of queries
    _stats.pxi    the second pass of the statistics
    _backward_job.pxi, _backward.pxi              the same for the backward pass
    _count.pxi    what a call would do, in numbers
    _arrays.pxi   Python's arrays: borrowed memory, batch axes that broadcast and fold
    _call.pxi     the check of a call: from Python's values to a job
    _results.pxi  where its results go; its run over all batch items
    _door.pxi     the entries
    _cache.pxi    tokens on the pages of a cache, and attention over them
    _angles.pxi, _encode.pxi, _rotary.pxi         positions
    below         the choice of an instruction set, measurements
"""
from cpython.buffer cimport PyBUF_STRIDES, PyBuffer_Release, PyObject_GetBuffer
from cpython.object cimport PyObject
from libc.float cimport DBL_MAX, DBL_MIN, FLT_MAX, FLT_MIN
from libc.math cimport INFINITY, NAN, fabs, nearbyint, sqrt
from libc.stdint cimport int64_t, uint16_t, uint32_t, uintptr_t
from libc.string cimport memcpy, memset

from ._kernels cimport (AT_ALIGN, AT_ALTERNATING, AT_ANGLE_BLOCK, AT_APART, AT_BF16, AT_CHUNK, AT_F16, AT_F32, AT_F64,
                        AT_FEW_KEYS, AT_MAX_ROWS, AT_MIN_POWER_F32, AT_MIN_POWER_F64, AT_PANEL, AT_PEAK_FMAS,
                        AT_ROTATION, AT_ROW_CHUNK, AT_SIZE_OF, AT_STRIP_PAIRS, AT_TOP_SCRATCH, AT_WORD, LN2, LOG2E,
                        at_ahead, at_angles, at_await, at_exp2, at_float_of_bf16, at_float_of_f16, at_guard_enter,
                        at_guard_leave, at_idle_like, at_isa, at_isa_at, at_isa_count, at_isa_supported, at_log2,
                        at_mask_run, at_mask_words, at_outer_rows, at_pass, at_pool_run, at_pool_workers,
                        at_rotary_rows, at_row_numbers, at_scratch, at_sums, at_tiles, at_top, at_value_rows)

import numpy

cdef extern from "Python.h":
    const Py_ssize_t PY_SSIZE_T_MAX

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
cdef object zeros = numpy.zeros
cdef object array_of = numpy.array
cdef object integer = numpy.integer
cdef object bool_ = numpy.dtype(numpy.bool_)
cdef object intp = numpy.dtype(numpy.intp)
cdef object empty_like = numpy.empty_like
cdef object uint16 = numpy.dtype(numpy.uint16)
cdef object float16 = numpy.dtype(numpy.float16)
cdef object float32 = numpy.dtype(numpy.float32)
cdef object float64 = numpy.dtype(numpy.float64)

include "_job.pxi"
include "_blocks.pxi"
include "_bias.pxi"
include "_storage.pxi"
include "_pass.pxi"
include "_few.pxi"
include "_stats.pxi"
include "_backward_job.pxi"
include "_backward.pxi"
include "_count.pxi"
include "_arrays.pxi"
include "_call.pxi"
include "_results.pxi"
include "_door.pxi"
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
    reading.tiles = active.f32
    reading.data = &data[0]
    reading.n = data.shape[0]
    reading.slice_ = 1 << 14
    with nogil:
        at_pool_run(read_slice, &reading, (reading.n + reading.slice_ - 1) // reading.slice_, threads)


def constants():
    """The numbers of kernels.h that constants.py repeats, by their names there."""
    return {"ALIGN": AT_ALIGN, "CHUNK": AT_CHUNK, "LOG2E": LOG2E,
            "MIN_POWER": {4: AT_MIN_POWER_F32, 8: AT_MIN_POWER_F64}, "PANEL": AT_PANEL}


def compiler():
    """The compiler that built the core."""
    return COMPILER.decode()


def pool_workers():
    """Number of worker threads started so far in this process."""
    return at_pool_workers()


set_isa(next(isa for isa, supported in isas().items() if supported))
