"""Rotary position embedding: checks, positions, tables, memory; the arithmetic is in kernels/rotary.inc or in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..arguments import as_array, check_out, finite, flag, integer
from ..core import twin_angles
from ..core.twin_angles import Rotation
from ..runtime import backend
from ..runtime.threads import threads_for
from ..storage import promoted, ready
from .scaling import DEFAULT_BASE, NAME, Scaling, frequencies, read_scaling

Array = NDArray[Any]
Inverse = bool | Literal["transpose"]

_FLOAT32, _FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
_FARTHEST = 2**50  # positions; and angles in radians: the kernels take quarter turns modulo 4 from numbers below 2**51
_QUARTERS = _FARTHEST * 0.6366197723675814  # 2 / pi


class Places(NamedTuple):
    """Positions of the rows: `array` (1 or items, L) int64, or first, first + 1, ..., and their range."""

    first: int
    array: Array | None
    smallest: int
    largest: int


def _rotary_dim(rotary_dim: Any, width: int, fraction: float | None = None) -> int:
    """Number of elements that are rotated."""
    dim = width if fraction is None else int(width * fraction)
    if rotary_dim is not None:
        given = integer(NAME, "rotary_dim", rotary_dim)
        if fraction is not None and given != dim:
            raise ValueError(
                f"{NAME}: rotary_dim is {given} and scaling['partial_rotary_factor'] is {fraction}, which makes {dim} "
                f"of {width}; leave out one of the two"
            )
        dim = given
    if 0 < dim <= width and dim % 2 == 0:
        return dim
    name = "the last axis of x" if rotary_dim is None and fraction is None else "rotary_dim"
    if width < 2:
        raise ValueError(f"{NAME}: {name} is {dim}; x needs at least two elements, one pair, on its last axis")
    raise ValueError(
        f"{NAME}: {name} is {dim}; the number of rotated elements must be even, positive and at most {width}, the last "
        f"axis of x (rotary_dim={width // 2 * 2} turns the most pairs)"
    )


def _plain(array: Array, dtype: type) -> Array:
    """As the core takes tables: in this dtype, contiguous and aligned, which a contiguous array need not be."""
    return np.require(array, dtype, ("C", "A"))


def places_of(positions: Any, lead: tuple[int, ...], rows: int) -> Places:
    """The checked positions of rows with these batch axes."""
    if positions is None:
        return Places(0, None, 0, rows - 1)
    if type(positions) is int and 0 <= positions <= _FARTHEST - rows:  # at every token of a decoder
        return Places(positions, None, positions, positions + rows - 1)
    if isinstance(positions, (int, np.integer)) or (isinstance(positions, np.ndarray) and positions.ndim == 0):
        first = integer(NAME, "positions", positions if not isinstance(positions, np.ndarray) else positions[()])
        if not -_FARTHEST <= first <= first + max(rows - 1, 0) <= _FARTHEST:
            raise ValueError(
                f"{NAME}: positions={first} puts {rows} rows at positions up to {first + rows - 1}; they "
                "must stay within -2**50 and 2**50"
            )
        return Places(first, None, first, first + rows - 1)
    array = as_array(NAME, "positions", positions)
    if array.dtype.kind not in "iu" and not (array.size == 0 and isinstance(positions, (list, tuple))):
        raise TypeError(f"{NAME}: positions has dtype {array.dtype}; positions must be integers (.astype(np.int64))")
    if array.shape[-1:] != (rows,):
        raise ValueError(
            f"{NAME}: positions has shape {array.shape}; its last axis must be L = {rows}, one position per "
            "row of x (an int is the position of the first row)"
        )
    try:
        shaped = np.broadcast_to(array, (*lead, rows))
    except ValueError:
        raise ValueError(
            f"{NAME}: positions has shape {array.shape}; it must be ({rows},) or broadcast to "
            f"{(*lead, rows)}, the batch axes of x and L"
        ) from None
    if array.size and not -_FARTHEST <= int(array.min()) <= int(array.max()) <= _FARTHEST:
        raise ValueError(
            f"{NAME}: positions run from {array.min()} to {array.max()}; they must stay within -2**50 and 2**50"
        )
    one = array.size == rows  # all items share it
    at = _plain(array.reshape(1, rows) if one else shaped.reshape(-1, rows), np.int64)
    return Places(0, at, int(at.min(initial=_FARTHEST)), int(at.max(initial=-_FARTHEST)))


# ---- what rotates the pairs ----


def _table(name: str, table: Any, dim: int) -> Array:
    array = as_array(NAME, name, table)
    if (array.dtype.kind != "f" or array.itemsize > 8) and array.dtype.name != "bfloat16":
        raise TypeError(f"{NAME}: {name} has dtype {array.dtype}; it must be float64, float32, float16 or bfloat16")
    if array.ndim != 2 or array.shape[1] != dim // 2:
        raise ValueError(
            f"{NAME}: {name} has shape {array.shape}; it must be (positions, rotary_dim / 2) = "
            f"(positions, {dim // 2}), one column per pair (of a table that repeats its columns, give the first half)"
        )
    return array


def _rotation_by_table(
    width: int, places: Places, rotary_dim: Any, cos: Any, sin: Any, interleaved: bool, inverse: Inverse
) -> tuple[Rotation, Places]:
    """The rotation by both tables in float32 or float64 as the core takes them, and the positions as rows of them."""
    dim = _rotary_dim(rotary_dim, width)
    if cos is None or sin is None:
        raise ValueError(
            f"{NAME}: {'cos' if sin is None else 'sin'} is given without {'sin' if sin is None else 'cos'}; "
            "give both tables"
        )
    cosines, sines = _table("cos", cos, dim), _table("sin", sin, dim)
    if cosines.shape != sines.shape:
        raise ValueError(f"{NAME}: cos has shape {cosines.shape} and sin {sines.shape}; they must be equal")
    n, dtype = len(cosines), cosines.dtype
    if places.smallest <= places.largest and not 0 <= places.smallest <= places.largest < n:
        raise IndexError(
            f"{NAME}: positions run from {places.smallest} to {places.largest} and the tables have {n} rows; "
            f"with cos= and sin= each position must lie between 0 and {n - 1}"
        )
    fit = dtype in (np.float32, np.float64) and inverse is not True
    if not fit or any(t.dtype != dtype or not t.flags.aligned or t.strides[1] != t.itemsize for t in (cosines, sines)):
        at = places.array
        if at is None:
            at = np.arange(places.first, places.largest + 1)[None]
        if at.size < n:  # the rows that are met, no others
            cosines, sines = cosines[at.ravel()], sines[at.ravel()]
            places = Places(0, np.arange(at.size, dtype=np.int64).reshape(at.shape), 0, at.size - 1)
        cosines, sines = _plain(cosines, np.float64), _plain(sines, np.float64)
        if inverse is True:
            cosines, sines = _undone(cosines, sines)
    return Rotation(dim // 2, interleaved, None, None, cosines, sines, 1.0, -1.0 if inverse else 1.0), places


def _undone(cosines: Array, sines: Array) -> tuple[Array, Array]:
    """The tables whose rotation backwards undoes the one by these: both divided by cos^2 + sin^2."""
    with np.errstate(all="ignore"):
        size = np.hypot(cosines, sines)  # squares could leave the range of float64
        if (size == 0).any():
            row, pair = np.argwhere(size == 0)[0]
            raise ValueError(
                f"{NAME}: inverse=True cannot undo a pair whose cosine and sine are both 0, as in pair "
                f"{pair} of row {row} of those that the call uses"
            )
        return cosines / size / size, sines / size / size


def _settled(width: int, base: Any, rotary_dim: Any, scaling: Any) -> tuple[float, int, Scaling]:
    """(base, rotary_dim, scaling), of which the last one may give the others."""
    real, rules = finite(NAME, "base", base), read_scaling(scaling)
    if rules.base is not None:
        if real not in (DEFAULT_BASE, rules.base):
            raise ValueError(
                f"{NAME}: base is {real} and scaling['rope_theta'] is {rules.base}; leave out one of the two"
            )
        real = rules.base
    return real, _rotary_dim(rotary_dim, width, rules.rotary_fraction), rules


def _rotation_by_angle(
    width: int, places: Places, base: Any, rotary_dim: Any, scaling: Any, interleaved: bool, inverse: Inverse
) -> Rotation:
    real, dim, rules = _settled(width, base, rotary_dim, scaling)
    found = frequencies(rules, real, dim, places.largest + 1)
    reach = max(abs(places.smallest), abs(places.largest)) if places.smallest <= places.largest else 0
    if found.largest * max(reach, 1) > _QUARTERS:
        raise ValueError(
            f"{NAME}: base is {real}, with which positions up to {reach} turn by more than 2**50 radians; "
            "use a larger base or smaller positions"
        )
    factor = 1.0 / found.attention_factor if inverse is True else found.attention_factor
    return Rotation(dim // 2, interleaved, found.high, found.low, None, None, factor, -factor if inverse else factor)


# ---- memory ----


def _four_axes(array: Array) -> Array:
    """(B, H, L, D), a view where strides allow it."""
    return array[(None,) * (4 - array.ndim)] if array.ndim <= 4 else array.reshape(-1, *array.shape[-3:])


def _apart(x: Array, out: Array) -> Array:
    """x, or a copy of it if it shares memory with out other than element by element."""
    if x is out or not np.may_share_memory(x, out):
        return x
    same = x.ctypes.data == out.ctypes.data and x.strides == out.strides and x.dtype == out.dtype
    return x if same else x.copy()


def _rotate(x: Array, out: Array, rotation: Rotation, places: Places) -> None:
    """Non-empty x rotated into out, both of any layout; out has the dtype of the result."""
    run: Callable[..., None] = (backend.active or twin_angles).rotate
    threads = threads_for(None, NAME)
    plain = x.ndim == 4 and out.dtype is x.dtype and x.flags.c_contiguous and out.flags.c_contiguous
    if plain and x.flags.aligned and out.flags.aligned and (x is out or not np.may_share_memory(x, out)):
        # One token of 32 heads takes less than the questions below.
        run(x, out, rotation, places.array, places.first, threads)
        return
    target = _four_axes(out)
    last_contiguous = target.shape[-1] == 1 or target.strides[-1] == target.itemsize
    # More than four axes need not fold into a view.
    direct = np.may_share_memory(target, out) and target.flags.aligned and last_contiguous
    if not direct:
        target = np.empty(target.shape, out.dtype)
    run(_four_axes(_apart(ready(x, target.dtype), out)), target, rotation, places.array, places.first, threads)
    if not direct:
        out[...] = target.reshape(out.shape)


def rotary_embedding(
    x: ArrayLike,
    positions: ArrayLike | None = None,
    *,
    base: float = DEFAULT_BASE,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    scaling: Mapping[str, Any] | None = None,
    cos: ArrayLike | None = None,
    sin: ArrayLike | None = None,
    inverse: Inverse = False,
    out: Array | None = None,
) -> Array:
    """Rotary position embedding: each pair of elements of a row is rotated by an angle proportional to its position.

    With angle = position * base**(-2i / rotary_dim) a pair (a, b) becomes
    ``(a cos(angle) - b sin(angle), b cos(angle) + a sin(angle))``, so that the product of a query at m and a key at n
    depends on m - n only. Angles have twice the digits of float64, the arithmetic is float64 and rounded once. The bits
    of a row depend on its values and its position, and on nothing else (batch, L, layout, threads, AVX2 or AVX-512);
    with dynamic and longrope also on the length. Formula: Su et al., "RoFormer", 2021, section 3.4.2; of the scaling:
    Peng et al., "YaRN", 2023; Ding et al., "LongRoPE", 2024; Grattafiori et al., "The Llama 3 Herd", 2024.

    Parameters
    ----------
    x : array_like, shape (..., H, L, D) or (L, D)
        Queries or keys, one row per token. float64, float32, float16 and bfloat16 are kept, integers give float64.
    positions : None, int or array_like of int, shape (L,) or (..., L), optional
        0, 1, ... (None), from this one on (int), these, or these for each batch item: the axes before L broadcast to
        those of x before H. Any order, negative ones too, within -2**50 and 2**50.
    base : float, optional
        The first pair turns by one radian per position, the last ones by nearly 1 / base. Finite and positive.
    rotary_dim : int, optional
        How many elements of a row are rotated, the first ones; the others are copied. Even, at most D; default D.
    interleaved : bool, optional
        Pairs are elements 2i and 2i + 1; else i and i + rotary_dim / 2, as in most published models.
    scaling : dict, optional
        Long-context method as model configurations hold it (``rope_scaling``, ``rope_parameters``). ``rope_type`` or
        ``type`` is one of default, linear, ntk, dynamic, yarn, longrope (su), llama3; the other keys are those of the
        method. dynamic and longrope depend on the length, the largest position of the call + 1. ``rope_theta`` in it
        is the base, ``partial_rotary_factor`` gives rotary_dim.
    cos, sin : array_like of float, shape (n, rotary_dim / 2), optional
        Tables of the caller, row = position, instead of base and scaling. They need not be a rotation.
    inverse : bool or "transpose", optional
        True: undo the embedding of the same arguments. Where cos**2 + sin**2 = 1 (always without tables and attention
        factor) that is its gradient as well: it turns the gradient of the result into that of x. Otherwise it divides
        by cos**2 + sin**2, which the gradient does not: that is "transpose".
    out : ndarray, shape of x, optional
        Array of the result's dtype with any strides to write into. ``out=x`` works in place.

    Returns
    -------
    ndarray, shape of x
        `out` if it was given.

    Raises
    ------
    TypeError
        A dtype or a kind of argument that is not supported, such as positions that are not integers.
    ValueError
        Shapes, rotary_dim, positions or keys of scaling that do not fit; tables together with base or scaling; an out
        that is read-only or overlaps itself; an inverse that does not exist.
    IndexError
        A position without a row in the tables. As with every error, nothing has been written then.

    Examples
    --------
    >>> import numpy as np
    >>> from attentile import rotary_embedding
    >>> rotary_embedding([[1.0, 0.0]], [1]).round(4)
    array([[0.5403, 0.8415]])
    >>> q = np.ones((1, 2, 3, 4), dtype=np.float32)  # batch 1, 2 heads, 3 tokens, width 4
    >>> yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    >>> rotated = rotary_embedding(q, 10, scaling=yarn)  # tokens at positions 10, 11, 12
    >>> np.allclose(rotary_embedding(rotated, 10, scaling=yarn, inverse=True), q)
    True
    """
    array = as_array(NAME, "x", x)
    if array.ndim < 2:
        raise ValueError(f"{NAME}: x has shape {array.shape}; it needs at least two axes, (L, D)")
    dtype = array.dtype
    if dtype is not _FLOAT32 and dtype is not _FLOAT64:
        _, dtype = promoted(NAME, array)
    paired = flag(NAME, "interleaved", interleaved)
    back: Inverse = (
        "transpose" if isinstance(inverse, str) and inverse == "transpose" else flag(NAME, "inverse", inverse)
    )
    places, width = places_of(positions, array.shape[:-3], array.shape[-2]), array.shape[-1]
    if cos is None and sin is None:
        rotation = _rotation_by_angle(width, places, base, rotary_dim, scaling, paired, back)
    else:
        if scaling is not None or not (isinstance(base, (int, float)) and base == DEFAULT_BASE):
            also = "scaling" if scaling is not None else "base"
            raise ValueError(
                f"{NAME}: {also} is given with cos and sin; tables hold the angles already, so leave {also} out"
            )
        rotation, places = _rotation_by_table(width, places, rotary_dim, cos, sin, paired, back)
    if out is None:
        out = np.empty(array.shape, dtype)
    else:
        check_out(NAME, out, array.shape, dtype)
        if rotation.cosines is not None and rotation.sines is not None:
            rotation = rotation._replace(cosines=_not_in(out, rotation.cosines), sines=_not_in(out, rotation.sines))
        if places.array is not None:
            places = places._replace(array=_not_in(out, places.array))
    if out.size:
        _rotate(array, out, rotation, places)
    return out


def _not_in(out: Array, table: Array) -> Array:
    """The table, or a copy of it if writing to out could change it."""
    return table.copy() if np.may_share_memory(out, table) else table


def settled_options(options: Mapping[str, Any], width: int) -> tuple[Any, ...]:
    """What the options of rotary_embedding say for rows of this width, defaults filled in; the tables are last."""
    get = options.get
    base, dim, rules = _settled(width, get("base", DEFAULT_BASE), get("rotary_dim"), get("scaling"))
    return base, dim, bool(get("interleaved", False)), rules.kind, rules.values, get("cos"), get("sin")
