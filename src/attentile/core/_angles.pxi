# What the drivers of both positional encodings share, _encode.pxi and _rotary.pxi. Included by _core.pyx.
#
# A position is 64 a + b with 0 <= b < 64: sines and cosines are computed for every b (the fine rows) and once per a,
# and a row is the one rotated by the other. The split is absolute, hence a row's bits depend on its position, whatever
# the call's positions are. Pairs go in strips, so that the fine rows stay in the L2 cache (64 rows * 256 pairs * 16
# bytes = 256 KiB) and scratch is bounded by them.

cdef enum:
    FINE_ROWS = 64                              # positions that share one a
    STRIP_PAIRS = AT_STRIP_PAIRS                # whole blocks of pairs


cdef inline int64_t fine_row(int64_t position) noexcept nogil:
    """b of a position, or of a difference of positions."""
    return position & (FINE_ROWS - 1)           # and: floor for negatives too


cdef inline Py_ssize_t whole_blocks(Py_ssize_t pairs) noexcept nogil:
    """So many pairs and those that the tiles compute with the last of them."""
    return (pairs + AT_ANGLE_BLOCK - 1) // AT_ANGLE_BLOCK * AT_ANGLE_BLOCK
