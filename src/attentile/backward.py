"""attention_backward() and attention_vjp(): the gradients of attention().

    _Call(q, k, v, options)         checked, as attention() checks it
      Given                         what the forward pass left, and the incoming gradients
      Wanted                        where the gradients go, with every batch axis
      dispatch.backward(...)        the core, or core/twin_backward.py, which has the formulas

The gradients with every batch axis are then summed back to the shape of each argument and rounded to its dtype.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Unpack, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import dispatch
from .arguments import as_array, check_out, named_in_errors, unknown_option
from .core.twin_backward import summed_to
from .outputs import AttentionResult, Outputs
from .runtime.threads import threads_for
from .scores import SCORE_OPTIONS, ScoreOptions, checked
from .storage import gradient_dtype, is_floating, ready, rounded, stored

Array = NDArray[Any]

NAMES = ("q", "k", "v", "bias", "sinks", "alibi_slopes")
_REFUSED = {
    "score_mod": "it may be any function, and has no gradient here; write what it does as bias=, softcap= or "
    "alibi_slopes=",
    "before": "rows that go on from a Partial have seen keys that this call does not know; take the gradients of each "
    "part of the keys with the out and lse of the whole (see the notes)",
}


class AttentionGradients(NamedTuple):
    """What `attention_backward` returns; what was not asked for is None.

    Each has the shape of its argument, and its dtype; that of integers is in float64.

    Attributes
    ----------
    dq, dk, dv : ndarray, or None
        Gradients of queries, keys and values.
    dbias, dsinks, dalibi_slopes : ndarray, or None
        Gradients of the options of these names. `relative_bias_backward` and `t5_bias_backward` make of dbias the
        gradient of a table.

    Examples
    --------
    >>> import numpy as np
    >>> from attentile import attention_vjp
    >>> out, vjp = attention_vjp(np.zeros((1, 4)), np.zeros((2, 4)), np.eye(2))
    >>> vjp(np.ones((1, 2)), wrt="v").dv  # the weights of the two keys
    array([[0.5, 0.5],
           [0.5, 0.5]])
    """

    dq: Array | None = None
    dk: Array | None = None
    dv: Array | None = None
    dbias: Array | None = None
    dsinks: Array | None = None
    dalibi_slopes: Array | None = None


class Given(NamedTuple):
    """What the forward pass left and the incoming gradients: all axes of the results, ready for the core."""

    dout: Array
    out: Array
    lse: Array  # without sinks, in the dtype of the arithmetic
    dlse: Array | None


class Wanted(NamedTuple):
    """Where a backend writes; None: not wanted. dbias and dslopes are zero before, the others are filled."""

    dq: Array | None  # with every batch axis, in the dtype of the arithmetic or of the result, as dk and dv
    dk: Array | None
    dv: Array | None
    dbias: Array | None  # of the bias' own shape, in the dtype of the arithmetic
    dslopes: Array | None  # (Hq,) in float64
    delta: Array | None  # (..., Hq, L), the sum of dout * out of each row, in the dtype of the arithmetic


class _Call:
    """A call of attention() whose gradients are wanted."""

    def __init__(self, function: str, q: Any, k: Any, v: Any, options: Mapping[str, Any]) -> None:
        unknown_option(function, options, SCORE_OPTIONS.keys())
        for name, why in _REFUSED.items():
            if options.get(name) is not None:
                raise TypeError(f"{function}: {name} is given; {why}")
        self.function = function
        self.threads = threads_for(options.get("num_threads"), function)
        arguments = {"q": q, "k": k, "v": v, **{name: options.get(name) for name in NAMES[3:]}}
        self.arguments = {
            name: as_array(function, name, value) for name, value in arguments.items() if value is not None
        }
        changes = {name: self.arguments[name] for name in NAMES[3:] if name in self.arguments}
        q, k, v = (self.arguments[name] for name in "qkv")
        with named_in_errors(function):
            self.scores, self.v = checked(q, k, v, {**options, **changes})

    def forward(self) -> tuple[Array, Array]:
        """(out, lse), both in the dtype of the arithmetic: 16 bits would cost the gradients a rounding."""
        scores = copy.copy(self.scores)
        scores.dtype = scores.compute
        outputs = Outputs(scores, self.v, {"return_lse": True})
        dispatch.attend(scores, self.v, outputs, self.threads)
        assert outputs.out is not None
        assert outputs.lse is not None
        return outputs.out, outputs.lse

    # ---- what is given ----

    def given(self, dout: Any, out: Any, lse: Any, dlse: Any) -> Given:
        """The arrays of the rows, checked."""
        rows = self.scores.shape[:-1]
        shape = (*rows, self.v.shape[-1])
        array = self._numbers("lse", lse, rows)
        if not is_floating(array.dtype) or array.itemsize < self.scores.compute.itemsize:
            raise TypeError(
                f"{self.function}: lse has dtype {array.dtype}; it must be {self.scores.compute}, as attention returns "
                "it for these arrays with return_lse=True"
            )
        return Given(
            self._numbers("dout", dout, shape),
            self._numbers("out", out, shape),
            ready(array, self.scores.compute),
            None if dlse is None else ready(self._numbers("dlse", dlse, rows), self.scores.compute),
        )

    def _numbers(self, name: str, value: Any, shape: tuple[int, ...]) -> Array:
        """Real numbers of this shape, in 16 bits or in the dtype of the arithmetic, but for lse."""
        array = as_array(self.function, name, value)
        if not (is_floating(array.dtype) or array.dtype.kind in "iu"):
            raise TypeError(f"{self.function}: {name} has dtype {array.dtype}; it must be real numbers")
        if array.shape != shape:
            raise ValueError(
                f"{self.function}: {name} has shape {array.shape}; it must be {shape}, one number per row"
                if shape == self.scores.shape[:-1]
                else f"{self.function}: {name} has shape {array.shape}; it must be {shape}, that of the output"
            )
        if name == "lse":
            return array
        array = stored(array, self.scores.compute, self.scores.bits)
        return array if array.itemsize == 2 else ready(array, self.scores.compute)

    # ---- what is wanted ----

    def names(self, wrt: str | Sequence[str] | None) -> tuple[str, ...]:
        """The arguments whose gradients are asked for."""
        if wrt is None:
            return tuple(name for name in NAMES[:4] if name in self.arguments)
        names = (wrt,) if isinstance(wrt, str) else tuple(wrt)
        for name in names:
            if name not in NAMES:
                raise ValueError(f"{self.function}: wrt has {name!r}; it may name {', '.join(NAMES)}")
            if name not in self.arguments:
                raise ValueError(f"{self.function}: wrt has {name!r}, and there is no {name}= in the call")
        return names

    def dtype(self, name: str) -> np.dtype[Any]:
        """That of the gradient."""
        own = self.arguments[name].dtype
        bits = name in NAMES[:4] and self.scores.bits and own == np.uint16
        return np.dtype(np.uint16) if bits else gradient_dtype(own)

    def full_shape(self, name: str) -> tuple[int, ...]:
        """That of q, k or v with every batch axis."""
        scores, width = self.scores, self.arguments[name].shape[-1]
        if name == "q":
            return (*scores.shape[:-1], width)
        return (scores.keys, width) if scores.drop else (*scores.lead, scores.kv_heads, scores.keys, width)

    def check_places(self, names: tuple[str, ...], places: dict[str, Any], given: Given) -> None:
        """Refuses arrays for dq, dk and dv that do not fit, or that are not apart from all others."""
        others = {**self.arguments, "mask": self.scores.mask, **given._asdict()}
        for name, place in places.items():
            if name not in names:
                raise ValueError(f"{self.function}: d{name}= is given, and wrt leaves {name} out")
            check_out(self.function, place, self.arguments[name].shape, self.dtype(name), "d" + name)
            for other, array in others.items():
                if array is not None and np.may_share_memory(place, array) and np.shares_memory(place, array):
                    raise ValueError(
                        f"{self.function}: d{name} shares memory with {other}; pass an array of its own, or None"
                    )
            others["d" + name] = place

    def gradients(
        self, given: Given, wrt: str | Sequence[str] | None, dq: Array | None, dk: Array | None, dv: Array | None
    ) -> AttentionGradients:
        """Those that are asked for, in new arrays or where the caller wants them."""
        scores, names = self.scores, self.names(wrt)
        places = {name: place for name, place in zip("qkv", (dq, dk, dv), strict=True) if place is not None}
        self.check_places(names, places, given)
        work: dict[str, Array] = {}  # where the backend writes
        found: dict[str, Array] = {}
        for name in (name for name in "qkv" if name in names):
            place = places.get(name)
            found[name] = np.empty(self.arguments[name].shape, self.dtype(name)) if place is None else place
            work[name] = self._direct(name, found[name])
            if scores.empty:
                work[name][...] = 0
        if "bias" in names:
            work["bias"] = np.zeros(self.arguments["bias"].shape, scores.compute)
        if "alibi_slopes" in names:
            work["alibi_slopes"] = np.zeros(scores.heads)
        delta = np.zeros(scores.shape[:-1], scores.compute) if "sinks" in names else None
        dq, dk, dv, dbias, dslopes = map(work.get, ("q", "k", "v", "bias", "alibi_slopes"))
        wanted = Wanted(dq, dk, dv, dbias, dslopes, delta)
        dispatch.backward(scores, self.v, given, wanted, self.threads)
        if delta is not None:
            work["sinks"] = self._of_sinks(delta, given.lse)
        for name, array in work.items():
            place = found.get(name)
            if place is None:
                found[name] = rounded(array, self.dtype(name))
            elif not np.may_share_memory(place, array):
                with np.errstate(all="ignore"):
                    place[...] = rounded(summed_to(array, place.shape), place.dtype)
        return AttentionGradients(*map(found.get, NAMES))

    def _direct(self, name: str, place: Array) -> Array:
        """The array itself as a backend may write it, else a new one with every batch axis."""
        shape = self.full_shape(name)
        if (
            place.shape != shape
            or place.dtype not in (self.scores.compute, self.scores.dtype)
            or not place.flags.aligned
            or (shape[-1] > 1 and place.strides[-1] != place.itemsize)
        ):
            return np.empty(shape, self.scores.compute)
        return place.view(np.ndarray).view(np.dtype(place.dtype.type))

    def _of_sinks(self, delta: Array, lse: Array) -> Array:
        """A sink's share of a row is a weight like those of the keys, with a value of 0: dS = P * (0 - delta)."""
        scores = self.scores
        shape = (math.prod(scores.lead), scores.heads, scores.queries)
        delta, lse = delta.reshape(shape), lse.reshape(shape).astype(np.float64)
        assert scores.sinks is not None
        with np.errstate(all="ignore"):
            share = 1 / (1 + np.exp(lse - scores.sinks[:, None]))
            found: Array = np.where(np.isneginf(lse), 0, -share * delta).sum(axis=(0, 2))
        return found


def attention_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    *,
    dlse: ArrayLike | None = None,
    wrt: str | Sequence[str] | None = None,
    dq: Array | None = None,
    dk: Array | None = None,
    dv: Array | None = None,
    **options: Unpack[ScoreOptions],
) -> AttentionGradients:
    """The gradients of `attention`, from its output and logsumexp and the gradient of a loss by its output.

    Parameters
    ----------
    dout : array_like, shape (..., Hq, L, Dv)
        Gradient of the loss by the output.
    q, k, v : array_like
        As in the call of `attention`.
    out, lse : array_like, shapes (..., Hq, L, Dv) and (..., Hq, L)
        What ``attention(q, k, v, return_lse=True, **options)`` has returned.
    dlse : array_like, shape (..., Hq, L), optional
        Gradient of the loss by lse, if the loss depends on it.
    wrt : str or sequence of str, optional
        Of "q", "k", "v", "bias", "sinks", "alibi_slopes": whose gradients are wanted. Default: q, k, v, and a bias if
        there is one.
    dq, dk, dv : ndarray, of the shape and dtype of q, k, v, optional
        Where these gradients are written; also returned. Any strides; no memory of another argument.
    **options
        Those of the call of `attention`, all but score_mod and before; num_threads.

    Returns
    -------
    AttentionGradients(dq, dk, dv, dbias, dsinks, dalibi_slopes)
        None for what is not in `wrt`. Each has the shape of its argument (along axes that broadcast it is a sum) and
        its dtype; that of integers is in float64. 16-bit gradients are computed in float32 and rounded once.

    Raises
    ------
    TypeError, ValueError
        Whatever `attention` refuses; shapes and dtypes that do not fit; score_mod and before; a name in `wrt` that the
        call does not have. Every check runs before any work.

    Notes
    -----
    Keys that are excluded, rows without any key, and padding have gradient 0 and change no other gradient, whatever
    their places hold. With E = exp(scores - lse) of each head, and r = 1 / (1 + exp(sink - lse)), or 1 without sinks::

        dv = (E * r)^T dout      dS = E * (r * (dout v^T - rowsum(dout * out)) + dlse)
        dq = scale dS k          dk = scale dS^T q      dbias = dS      dalibi_slopes = -sum dS |distance|

    and softcap's factor 1 - (score / softcap)^2 on dS for dq and dk. The memory beside the gradients is O(L + S).
    Formula: Dao et al., "FlashAttention", 2022, appendix B.4.

    If `merge_attention` has joined parts of the keys, the gradients of each part are those of this function with its k
    and v and the merged out and lse; dq is the sum over the parts. This needs lse to tell the scores apart: where all
    scores of a row are so large that lse loses the logarithm of their number, the gradients are as wrong as such a
    merge.

    Examples
    --------
    >>> import numpy as np
    >>> from attentile import attention, attention_backward
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 4, 6, 8))
    >>> out, lse, _ = attention(q, k, v, causal=True, return_lse=True)
    >>> grads = attention_backward(np.ones_like(out), q, k, v, out, lse, causal=True)
    >>> grads.dq.shape
    (2, 4, 6, 8)
    >>> up, down = (attention(q, k + e, v, causal=True).sum() for e in (1e-6, -1e-6))
    >>> np.allclose(grads.dk.sum(), (up - down) / 2e-6, atol=1e-6)
    True
    """
    call = _Call("attention_backward", q, k, v, options)
    return call.gradients(call.given(dout, out, lse, dlse), wrt, dq, dk, dv)


VJP = Callable[..., AttentionGradients]


@overload
def attention_vjp(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, return_lse: Literal[False] = ..., **options: Unpack[ScoreOptions]
) -> tuple[Array, VJP]: ...


@overload
def attention_vjp(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, return_lse: Literal[True], **options: Unpack[ScoreOptions]
) -> tuple[AttentionResult, VJP]: ...


def attention_vjp(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, return_lse: bool = False, **options: Unpack[ScoreOptions]
) -> tuple[Array | AttentionResult, VJP]:
    """`attention`, and the function that takes gradients back through it.

    Parameters
    ----------
    q, k, v : array_like
        As in `attention`. They are kept, not copied: do not change them before the last call of vjp.
    return_lse : bool
        Return AttentionResult(out, lse, None) in place of out.
    **options
        Those of `attention`, all but score_mod, before, return_weights and out.

    Returns
    -------
    out : ndarray, shape (..., Hq, L, Dv), or AttentionResult
        What `attention` returns, bit for bit, but read-only, as vjp needs it: copy it to change it.
    vjp : callable
        ``vjp(dout, dlse=None, *, wrt=None, dq=None, dk=None, dv=None)`` gives AttentionGradients, as
        `attention_backward` does, as often as it is called.

    Raises
    ------
    TypeError, ValueError
        As `attention` and `attention_backward`.

    Notes
    -----
    For 16-bit arrays vjp keeps the output in float32, so that the gradients are those of the float32 call, rounded
    once. `attention_backward` must do with the output that it is given.

    Examples
    --------
    >>> import numpy as np
    >>> from attentile import attention_vjp
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 6, 8))
    >>> out, vjp = attention_vjp(q, k, v, causal=True)
    >>> dq, dk, dv, *_ = vjp(np.ones_like(out))
    >>> dv.sum(axis=0).round(3)  # each row gives out 1
    array([6., 6., 6., 6., 6., 6., 6., 6.])
    """
    call = _Call("attention_vjp", q, k, v, options)
    kept, lse = call.forward()

    def vjp(
        dout: ArrayLike,
        dlse: ArrayLike | None = None,
        *,
        wrt: str | Sequence[str] | None = None,
        dq: Array | None = None,
        dk: Array | None = None,
        dv: Array | None = None,
    ) -> AttentionGradients:
        """The gradients of q, k, v and so on, from those of out and lse."""
        return call.gradients(call.given(dout, kept, lse, dlse), wrt, dq, dk, dv)

    out = rounded(kept, call.scores.dtype)
    for array in (out, lse):
        array.flags.writeable = False
    return (AttentionResult(out, lse, None) if return_lse else out), vjp
