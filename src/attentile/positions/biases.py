"""Biases that depend on the distance between key and query: ALiBi's slopes, and tables as strided views."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..arguments import as_array, as_floating, integer, positive_index
from ..storage import rounded

Array = NDArray[Any]


def alibi_slopes(n_heads: int) -> Array:
    """Slopes of ALiBi for `attention(alibi_slopes=...)`.

    For n a power of two: 2^(-8 / n), 2^(-16 / n), ..., 2^-8. Otherwise the slopes of the largest power of two below n,
    followed by every second slope of the next power of two. Rule: Press, Smith, Lewis, "Train Short, Test Long", 2022,
    and the authors' code for other head counts.

    Parameters
    ----------
    n_heads : int
        Number of query heads, at least 1.

    Returns
    -------
    ndarray of float64, shape (n_heads,)

    Raises
    ------
    TypeError, ValueError
        If n_heads is not a positive integer.

    Examples
    --------
    >>> from attentile import alibi_slopes
    >>> alibi_slopes(4)
    array([0.25      , 0.0625    , 0.015625  , 0.00390625])
    """
    heads = positive_index("alibi_slopes", "n_heads", n_heads)
    power = 1 << (heads.bit_length() - 1)
    whole = np.exp2(-8.0 / power * np.arange(1, power + 1))
    between = np.exp2(-4.0 / power * np.arange(1, 2 * (heads - power), 2))
    return np.concatenate([whole, between])


_FAR = 2**60  # positions are clipped to it, so that sums cannot overflow; tables end long before


def _distances(function: str, queries: Any, keys: Any, q_start: Any) -> tuple[int, int, Array]:
    """(L, S, every distance key - query in ascending order, from that of the last query and key 0 on)."""
    rows = integer(function, "queries", queries, 0, otherwise="0 or a positive integer")
    columns = integer(function, "keys", keys, 0, otherwise="0 or a positive integer")
    first = max(-_FAR, min(integer(function, "q_start", q_start), _FAR))
    before = max(rows, 1) - 1  # without queries, the distances of one query: `_along_diagonals` needs them
    return rows, columns, np.arange(before + columns) - (first + before)


def _table(function: str, table: Any, axes: str) -> Array:
    """The table in float32 or float64, in which attention() computes, so that it need not convert (L, S) numbers."""
    array = as_floating(function, "table", table, "it must be floating (.astype(np.float32) makes one)")
    if array.ndim != 2:
        raise ValueError(f"{function}: table has shape {array.shape}; it must have two axes, {axes}")
    return array.astype(np.float64 if array.dtype.itemsize > 4 else np.float32, copy=False)


def _along_diagonals(vectors: Array, queries: int, keys: int) -> Array:
    """(H, L, S) view of vectors (H, L + S - 1): entry [h, i, j] is vectors[h, L - 1 - i + j]."""
    rows = np.lib.stride_tricks.sliding_window_view(np.ascontiguousarray(vectors), keys, axis=1)
    view: Array = rows[:, ::-1][:, :queries]
    return view


def relative_bias(table: ArrayLike, queries: int, keys: int, *, q_start: int = 0) -> Array:
    """Bias by the distance between key and query, for `attention(bias=...)`, in O(H (L + S)) memory.

    Query i stands at position q_start + i, key j at j; entry [h, i, j] is
    ``table[h, clip(j - (q_start + i), -m, m) + m]``, where m is the largest distance in the table. Formula: Shaw,
    Uszkoreit, Vaswani, "Self-Attention with Relative Position Representations", 2018, section 3.2, with one number per
    head and distance as in Raffel et al., 2020, section 2.1.

    Parameters
    ----------
    table : array_like of float, shape (H, 2 m + 1)
        One row per query head: column 0 is for keys m or more before the query, column m for its own position, column
        2 m for keys m or more after it. Use the dtype of q, so that attention() need not convert (H, L, S) numbers.
    queries, keys : int
        L and S; may be 0.
    q_start : int, optional
        Position of query 0, as in `attention`; may be negative.

    Returns
    -------
    ndarray, shape (H, L, S)
        Read-only strided view of L + S - 1 numbers per head; float64 for a float64 table, else float32.

    Raises
    ------
    TypeError
        If table is not floating, or queries, keys or q_start not an integer.
    ValueError
        If table does not have two axes and an odd number of columns, or queries or keys is negative.

    Examples
    --------
    >>> import numpy as np
    >>> from attentile import relative_bias
    >>> relative_bias(np.array([[-1.0, 0.0, 1.0]]), 3, 4)
    array([[[ 0.,  1.,  1.,  1.],
            [-1.,  0.,  1.,  1.],
            [-1., -1.,  0.,  1.]]])
    """
    rows, columns, distances = _distances("relative_bias", queries, keys, q_start)
    array = _table("relative_bias", table, "(heads, 2 * max_distance + 1)")
    if array.shape[1] % 2 == 0:
        raise ValueError(
            f"relative_bias: table has shape {array.shape}; it needs an odd number of columns, 2 * max_distance + 1, "
            "the middle one for distance 0"
        )
    reach = array.shape[1] // 2
    return _along_diagonals(array[:, np.clip(distances, -reach, reach) + reach], rows, columns)


def _sums_along_diagonals(function: str, dbias: Any, q_start: Any) -> tuple[Array, Array, np.dtype[Any]]:
    """(sums (H, L + S - 1) in float64 by distance, the distances, the dtype) of a gradient (H, L, S)."""
    array = as_floating(function, "dbias", dbias, "it must be floating, as attention_backward gives it")
    if array.ndim != 3:
        raise ValueError(f"{function}: dbias has shape {array.shape}; it must be (heads, queries, keys)")
    heads, queries, keys = array.shape
    _, _, distances = _distances(function, queries, keys, q_start)
    sums = np.zeros((heads, distances.size))
    with np.errstate(all="ignore"):
        for i in range(queries):  # the last query has the distances of the start
            sums[:, queries - 1 - i : queries - 1 - i + keys] += array[:, i]
    return sums, distances, array.dtype


def _sums_by_column(sums: Array, column: NDArray[np.intp], columns: int, dtype: np.dtype[Any]) -> Array:
    """(H, columns): the sums of the distances that take their number from each column."""
    found = np.zeros((len(sums), columns))
    with np.errstate(all="ignore"):
        np.add.at(found.T, column, sums.T)
    return rounded(found, dtype)


def relative_bias_backward(dbias: ArrayLike, max_distance: int, *, q_start: int = 0) -> Array:
    """Gradient of the table of `relative_bias`, from that of the bias: the sums over the keys at each distance.

    Parameters
    ----------
    dbias : array_like of float, shape (H, L, S)
        As `attention_backward` gives it, summed over batch axes that it may have.
    max_distance : int
        m, the largest distance in the table of shape (H, 2 m + 1).
    q_start : int, optional
        As in `relative_bias`.

    Returns
    -------
    ndarray, shape (H, 2 m + 1)
        In the dtype of dbias, summed in float64.

    Raises
    ------
    TypeError, ValueError
        If dbias is not floating or has not three axes, or max_distance or q_start is no integer or too small.

    Examples
    --------
    >>> import numpy as np
    >>> from attentile import relative_bias_backward
    >>> relative_bias_backward(np.ones((1, 3, 4)), max_distance=1)  # how often the bias has each number
    array([[3., 3., 6.]])
    """
    name = "relative_bias_backward"
    reach = integer(name, "max_distance", max_distance, 0, otherwise="0 or a positive integer")
    sums, distances, dtype = _sums_along_diagonals(name, dbias, q_start)
    column = np.clip(distances, -reach, reach) + reach
    return _sums_by_column(sums, column, 2 * reach + 1, dtype)


@lru_cache(maxsize=64)
def _bucket_starts(buckets: int, max_distance: int) -> Array:
    """Smallest distance of each of the buckets 1, 2, ...: first those of one distance, then the logarithmic ones.

    The rule's bucket e + floor(log(n / e) / log(m / e) * (b - e)), e = b // 2, reaches e + t where
    n^(b - e) >= m^t e^(b - e - t): compared as integers, so that no boundary is moved by the rounding of a logarithm.
    """
    from bisect import bisect_left  # here, because most programs that import attentile never need it

    exact = buckets // 2
    share = buckets - exact
    starts = list(range(1, exact + 1))
    for t in range(1, share):
        bound = max_distance**t * exact ** (share - t)
        starts.append(bisect_left(range(max_distance), bound, lo=starts[-1], key=lambda n: n**share))
    return np.array(starts)


def _buckets(
    function: str, distances: Array, num_buckets: Any, max_distance: Any, bidirectional: bool
) -> NDArray[np.intp]:
    buckets = positive_index(function, "num_buckets", num_buckets)
    reach = positive_index(function, "max_distance", max_distance)
    if buckets < 2 or (bidirectional and (buckets < 4 or buckets % 2)):
        wanted = "even and at least 4 (half of them for each direction)" if bidirectional else "at least 2"
        raise ValueError(f"{function}: num_buckets is {buckets}; it must be {wanted} if bidirectional={bidirectional}")
    buckets = buckets // 2 if bidirectional else buckets
    if not buckets // 2 < reach <= _FAR:
        raise ValueError(
            f"{function}: max_distance is {reach}; it must be larger than {buckets // 2}, the distances that have a "
            "bucket of their own, and at most 2**60"
        )
    away = np.clip(distances, -reach, reach)
    size = np.abs(away) if bidirectional else np.maximum(-away, 0)
    found: NDArray[np.intp] = np.searchsorted(_bucket_starts(buckets, reach), size, side="right")
    return found + buckets * (away > 0) if bidirectional else found


def t5_buckets(
    distances: ArrayLike, *, bidirectional: bool = True, num_buckets: int = 32, max_distance: int = 128
) -> NDArray[np.intp]:
    """Bucket of each key - query distance in T5's relative-position bias.

    Half of the buckets of a direction hold one distance each; the others hold ranges whose bounds grow exponentially
    up to max_distance, and the last one holds everything beyond. Rule: Raffel et al., "Exploring the Limits of Transfer
    Learning with a Unified Text-to-Text Transformer", 2020, section 2.1, and the authors' code; the boundaries are
    computed exactly.

    Parameters
    ----------
    distances : array_like of int
        Key position minus query position, any shape.
    bidirectional : bool, optional
        True (encoder): the second half of the buckets is for keys after the query. False (decoder): those all fall into
        bucket 0.
    num_buckets, max_distance : int, optional
        Buckets of both directions together; the distance from which on the last bucket is certainly used.

    Returns
    -------
    ndarray of intp, the shape of distances
        Buckets, 0 to num_buckets - 1.

    Raises
    ------
    TypeError
        If distances are not integers, or num_buckets or max_distance is not one.
    ValueError
        If num_buckets or max_distance is too small, or num_buckets odd with bidirectional.

    Examples
    --------
    >>> from attentile import t5_buckets
    >>> t5_buckets([-128, -8, -1, 0, 1, 8, 128])
    array([15,  8,  1,  0, 17, 24, 31])
    """
    array = as_array("t5_buckets", "distances", distances)
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"t5_buckets: distances has dtype {array.dtype}; it must be integers (key - query)")
    if array.dtype.kind == "u":
        array = np.minimum(array.astype(np.uint64), np.uint64(_FAR))  # must not wrap to negative numbers
    return _buckets("t5_buckets", array.astype(np.intp), num_buckets, max_distance, bidirectional)


def t5_bias(
    table: ArrayLike, queries: int, keys: int, *, bidirectional: bool = True, max_distance: int = 128, q_start: int = 0
) -> Array:
    """T5's relative-position bias for `attention(bias=...)`, in O(H (L + S)) memory.

    Entry [h, i, j] is ``table[bucket, h]``, where `t5_buckets` gives the bucket of the distance j - (q_start + i).
    T5 does not scale its scores: call attention with scale=1.0.

    Parameters
    ----------
    table : array_like of float, shape (num_buckets, H)
        As checkpoints store it (relative_attention_bias.weight). Use the dtype of q, see `relative_bias`.
    queries, keys, q_start : int
        As in `relative_bias`.
    bidirectional, max_distance : optional
        As in `t5_buckets`: True in encoders, False in decoders.

    Returns
    -------
    ndarray, shape (H, L, S)
        Read-only view as `relative_bias` returns it.

    Raises
    ------
    TypeError
        If table is not floating, or a number not an integer.
    ValueError
        If table does not have two axes or has too few rows, max_distance is too small, or queries or keys is negative.

    Examples
    --------
    >>> import numpy as np
    >>> from attentile import t5_bias
    >>> table = np.arange(32.0)[:, None]  # one head, whose bias is the bucket
    >>> t5_bias(table, 2, 4)
    array([[[ 0., 17., 18., 19.],
            [ 1.,  0., 17., 18.]]])
    """
    rows, columns, distances = _distances("t5_bias", queries, keys, q_start)
    array = _table("t5_bias", table, "(num_buckets, heads)")
    buckets = _buckets("t5_bias", distances, array.shape[0], max_distance, bidirectional)
    return _along_diagonals(array.T[:, buckets], rows, columns)


def t5_bias_backward(
    dbias: ArrayLike, num_buckets: int, *, bidirectional: bool = True, max_distance: int = 128, q_start: int = 0
) -> Array:
    """Gradient of the table of `t5_bias`, from that of the bias: the sums over the keys in each bucket.

    Parameters
    ----------
    dbias : array_like of float, shape (H, L, S)
        As in `relative_bias_backward`.
    num_buckets : int
        The rows of the table.
    bidirectional, max_distance, q_start : optional
        As in `t5_bias`.

    Returns
    -------
    ndarray, shape (num_buckets, H)
        In the dtype of dbias, summed in float64.

    Raises
    ------
    TypeError, ValueError
        If dbias is not floating or has not three axes, and whatever `t5_bias` refuses.

    Examples
    --------
    >>> import numpy as np
    >>> from attentile import t5_bias_backward
    >>> t5_bias_backward(np.ones((1, 2, 4)), num_buckets=4).ravel()  # of the distances 0, -1, none, 1 and more
    array([2., 1., 0., 5.])
    """
    sums, distances, dtype = _sums_along_diagonals("t5_bias_backward", dbias, q_start)
    buckets = _buckets("t5_bias_backward", distances, num_buckets, max_distance, bidirectional)
    return _sums_by_column(sums, buckets, num_buckets, dtype).T
