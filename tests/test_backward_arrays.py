"""Gradients in every dtype and layout: those of broadcast arguments, arrays of the caller's, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import dtype_of, normal, same_bits
from numpy.testing import assert_allclose, assert_array_equal

import attentile
from attentile import AttentionGradients, attention, attention_backward, attention_vjp
from attentile.storage import rounded, widened

Array = np.ndarray[Any, Any]
Options = dict[str, Any]

Q, K, V = normal(2, 4, 20, 8), normal(2, 2, 30, 8, seed=1), normal(2, 2, 30, 7, seed=2)
DOUT, DLSE = normal(2, 4, 20, 7, seed=3), normal(2, 4, 20, seed=4)
BIAS, SINKS, SLOPES = normal(4, 1, 30, seed=5), normal(4, seed=6), np.abs(normal(4, seed=7))
EVERYTHING: Options = {"bias": BIAS, "sinks": SINKS, "alibi_slopes": SLOPES, "causal": "lower_right", "softcap": 3.0}
NAMES = ("q", "k", "v", "bias", "sinks", "alibi_slopes")


def backward(dout: Any, q: Any, k: Any, v: Any, wrt: Any = None, **options: Any) -> AttentionGradients:
    """attention_backward() after the forward pass."""
    places = {name: options.pop(name) for name in ("dq", "dk", "dv", "dlse") if name in options}
    out, lse, _ = attention(q, k, v, return_lse=True, **options)
    return attention_backward(dout, q, k, v, out, lse, wrt=wrt, **places, **options)


def same(found: AttentionGradients, expected: AttentionGradients) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            same_bits(one, other)


# ---- dtypes ----


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_16_bits_are_computed_in_float32_and_rounded_once(impl, name):
    """Through attention_vjp(), with the bits of the float32 call."""
    dtype = dtype_of(name)
    q, k, v, bias = (x.astype(dtype) for x in (Q, K, V, BIAS))
    wide = [x.astype(np.float32) for x in (q, k, v)]
    options = EVERYTHING | {"bias": bias}
    out, vjp = attention_vjp(q, k, v, **options)
    whole, exact = attention_vjp(*wide, **options | {"bias": bias.astype(np.float32)})
    same_bits(out, whole.astype(dtype))
    found, expected = vjp(DOUT, DLSE, wrt=NAMES), exact(DOUT, DLSE, wrt=NAMES)
    for some in NAMES[:4]:
        same_bits(getattr(found, "d" + some), rounded(getattr(expected, "d" + some), dtype))
    same_bits(found.dsinks, expected.dsinks)
    # With the rounded output that attention() returns: as near as that is.
    near = backward(DOUT.astype(dtype), q, k, v, dlse=DLSE, **options)
    for some in NAMES[:4]:
        array = getattr(expected, "d" + some)
        limit = 8 * float(np.finfo(np.float16).eps if name == "float16" else 2.0**-7) * np.abs(array).max()
        assert_allclose(getattr(near, "d" + some).astype(np.float32), array, rtol=0, atol=limit)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_16_bits_of_many_heads_on_many_threads(isa, name):
    """Each head's sums have a place of their own until they are rounded."""
    dtype = dtype_of(name)
    random = np.random.default_rng(3)
    q, k, v, dout = (random.standard_normal((7, 3, 250, 16)).astype(dtype) for _ in range(4))
    wide = [x.astype(np.float32) for x in (q, k, v)]
    _, vjp = attention_vjp(*wide, causal=True)
    expected = [x.astype(dtype) for x in vjp(dout.astype(np.float32))[:3]]
    for threads in (1, 2, 5):
        _, vjp = attention_vjp(q, k, v, causal=True, num_threads=threads)
        for found, exact in zip(vjp(dout)[:3], expected, strict=True):
            assert found.dtype == dtype
            same_bits(found.view(np.uint16), exact.view(np.uint16))


def test_bits_of_bfloat16(impl):
    bfloat16 = dtype_of("bfloat16")
    q, k, v, bias, dout = (x.astype(bfloat16) for x in (Q, K, V, BIAS, DOUT))
    expected = backward(dout, q, k, v, bias=bias)
    q, k, v, bias, dout = (x.view(np.uint16) for x in (q, k, v, bias, dout))
    found = backward(dout, q, k, v, bias=bias, dtype="bfloat16")
    for one, other in zip(found[:4], expected[:4], strict=True):
        assert one is not None
        assert other is not None
        same_bits(one, other.view(np.uint16))
    mixed = backward(dout, q, widened(k, np.dtype(np.float32)), v, dtype="bfloat16")  # as float32
    assert [x.dtype for x in mixed[:3] if x is not None] == [np.uint16, np.float32, np.uint16]


def test_each_gradient_has_the_dtype_of_its_argument(impl):
    options = {"bias": BIAS.astype(np.float16), "sinks": SINKS.astype(np.float64), "alibi_slopes": [1, 2, 0, 3]}
    q, v = Q.astype(np.float64), V.astype(np.float16)
    found = backward(DOUT, q, K, v, wrt=NAMES, q_start=0, **options)
    expected = [np.float64, np.float32, np.float16, np.float16, np.float64, np.float64]
    assert [x.dtype for x in found if x is not None] == expected
    wide = {name: np.asarray(x, np.float64) for name, x in options.items()}
    exact = backward(DOUT, q, K.astype(np.float64), v.astype(np.float64), wrt=NAMES, q_start=0, **wide)
    for one, other in zip(found, exact, strict=True):
        assert one is not None
        assert other is not None
        assert_allclose(one, other.astype(one.dtype), rtol=1e-3 if one.itemsize == 2 else 1e-6, atol=1e-6)


def test_integers_have_gradients_in_float64(impl):
    q, k, v = ([[1, 2], [3, 4]], [[0, 1], [1, 0]], [[1], [3]])
    found = backward([[1], [1]], q, k, v)
    expected = backward(np.ones((2, 1)), *(np.array(x, np.float64) for x in (q, k, v)))
    same(found, expected)


def test_other_byte_orders_and_places_in_memory(impl):
    expected = backward(DOUT, Q, K, V, dlse=DLSE, bias=BIAS)
    swapped = [x.astype(x.dtype.newbyteorder()) for x in (DOUT, Q, K, V, DLSE, BIAS)]
    transposed = [np.ascontiguousarray(x.T).T for x in (DOUT, Q, K, V, DLSE, BIAS)]
    odd = [np.frombuffer(b"x" + x.tobytes(), x.dtype, offset=1).reshape(x.shape) for x in (DOUT, Q, K, V, DLSE, BIAS)]
    for dout, q, k, v, dlse, bias in (swapped, transposed, odd):
        same(backward(dout, q, k, v, dlse=dlse, bias=bias), expected)


# ---- broadcasting ----


@pytest.mark.parametrize(
    "shapes",
    [
        ((20, 8), (2, 1, 30, 8), (30, 7)),
        ((3, 2, 4, 20, 8), (2, 2, 30, 8), (3, 1, 2, 30, 7)),
        ((2, 1, 4, 20, 8), (1, 3, 2, 30, 8), (2, 30, 7)),
        ((20, 8), (30, 8), (30, 7)),
    ],
)
def test_broadcast_batch_axes_are_summed(impl, shapes):
    q, k, v = (normal(*shape, dtype=np.float64, seed=i) for i, shape in enumerate(shapes))
    dout = normal(*attention(q, k, v).shape, dtype=np.float64, seed=5)
    found = backward(dout, q, k, v)
    lead = dout.shape[:-3]
    full = [np.broadcast_to(x, lead + (x.shape[-3:] if dout.ndim > 2 else x.shape)) for x in (q, k, v)]
    if dout.ndim > 2:
        full = [np.broadcast_to(x, lead + (1,) * max(0, 3 - x.ndim) + x.shape[-3:]) for x in (q, k, v)]
    expected = backward(dout, *full)
    for array, whole, argument in zip(found, expected, (q, k, v), strict=False):
        assert array is not None
        assert whole is not None
        assert array.shape == argument.shape
        axes = whole.ndim - argument.ndim
        total = whole.sum(axis=tuple(range(axes)))
        total = total.sum(axis=tuple(i for i, n in enumerate(argument.shape) if total.shape[i] != n), keepdims=True)
        assert_allclose(array, total, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(), (30,), (20, 1), (20, 30), (4, 1, 1), (4, 20, 30), (2, 1, 1, 30), (2, 4, 20, 30)])
def test_biases_of_every_shape(impl, shape):
    q, k, v, dout = (x.astype(np.float64) for x in (Q, K, V, DOUT))
    bias = np.asarray(normal(*shape, dtype=np.float64))
    found = backward(dout, q, k, v, wrt="bias", bias=bias).dbias
    whole = backward(dout, q, k, v, bias=np.broadcast_to(bias, (2, 4, 20, 30))).dbias
    assert found is not None
    assert whole is not None
    assert found.shape == shape
    total = whole.sum(axis=tuple(range(4 - len(shape))))
    total = total.sum(axis=tuple(i for i, n in enumerate(shape) if n == 1), keepdims=True)
    assert_allclose(found, total.reshape(shape), rtol=1e-11, atol=1e-12)


def test_a_bias_with_the_one_head_of_arrays_without(impl):
    bias = normal(1, 20, 30)
    found = backward(DOUT[0, 0], Q[0, 0], K[0, 0], V[0, 0], bias=bias)
    same(found._replace(dbias=None), backward(DOUT[0, 0], Q[0, 0], K[0, 0], V[0, 0], ("q", "k", "v"), bias=bias[0]))
    assert found.dbias is not None
    assert found.dbias.shape == (1, 20, 30)


# ---- places of the caller's ----


def test_gradients_go_where_the_caller_wants_them(impl):
    expected = backward(DOUT, Q, K, V, **EVERYTHING)
    tokens = np.full((2, 20, 4, 8), np.nan, np.float32)  # the layout of a projection's rows
    wide = np.full((2, 2, 30, 16), np.nan, np.float32)
    places = {"dq": tokens.swapaxes(1, 2), "dk": wide[..., ::2], "dv": np.full_like(V, np.nan)}
    found = backward(DOUT, Q, K, V, **EVERYTHING, **places)
    same(found, expected)
    assert found.dq is places["dq"]
    assert found.dk is places["dk"]
    assert np.isnan(wide[..., 1::2]).all()


def test_places_may_lie_between_each_other(impl):
    """As the columns of a fused projection do: one array for all three."""
    q, k, v = normal(3, 2, 4, 20, 8)
    fused = np.empty((2, 20, 3, 4, 8), np.float32)
    dq, dk, dv = (fused[:, :, i].swapaxes(1, 2) for i in range(3))
    same(backward(q, q, k, v, dq=dq, dk=dk, dv=dv), backward(q, q, k, v))


def test_one_that_broadcasts_and_one_of_16_bits(impl):
    q, k = Q[0].astype(np.float16), K.astype(np.float64)
    dq, dk = np.empty_like(q), np.empty_like(k)
    found = backward(DOUT, q, k, V, dq=dq, dk=dk)
    same(found, backward(DOUT, q, k, V))
    assert found.dq is dq


class Own(np.ndarray[Any, Any]):
    """A subclass of ndarray."""


def test_subclasses(impl):
    q, k, v = (x.view(Own) for x in (Q, K, V))
    found = backward(DOUT.view(Own), q, k, v, bias=BIAS.view(Own))
    same(found, backward(DOUT, Q, K, V, bias=BIAS))
    assert type(found.dq) is type(found.dbias) is np.ndarray
    place = np.empty_like(Q).view(Own)
    assert backward(DOUT, Q, K, V, dq=place).dq is place
    assert_array_equal(place, backward(DOUT, Q, K, V).dq)


# ---- what is asked for ----


@pytest.mark.parametrize("name", NAMES)
def test_one_gradient_alone(impl, name):
    found = backward(DOUT, Q, K, V, wrt=name, dlse=DLSE, **EVERYTHING)
    every = backward(DOUT, Q, K, V, wrt=NAMES, dlse=DLSE, **EVERYTHING)
    same(found, AttentionGradients(**{"d" + name: getattr(every, "d" + name)}))


def test_what_is_asked_for_by_default(either):
    assert [x is not None for x in backward(DOUT, Q, K, V)] == [True] * 3 + [False] * 3
    assert [x is not None for x in backward(DOUT, Q, K, V, **EVERYTHING)] == [True] * 4 + [False] * 2
    assert backward(DOUT, Q, K, V, wrt=()) == AttentionGradients()


# ---- errors ----


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"dout": DOUT[..., :3]}, ValueError, r"dout has shape \(2, 4, 20, 3\); it must be \(2, 4, 20, 7\), that of"),
        ({"dout": DOUT.astype(complex)}, TypeError, "dout has dtype complex128; it must be real numbers"),
        ({"dout": DOUT > 0}, TypeError, "dout has dtype bool; it must be real numbers"),
        ({"out": DOUT[0]}, ValueError, r"out has shape \(4, 20, 7\); it must be \(2, 4, 20, 7\), that of"),
        ({"lse": DLSE[..., None]}, ValueError, r"lse has shape \(2, 4, 20, 1\); it must be \(2, 4, 20\), one number"),
        ({"lse": DLSE.astype(np.float16)}, TypeError, "lse has dtype float16; it must be float32, as attention"),
        ({"lse": DLSE.astype(int)}, TypeError, "lse has dtype int64; it must be float32"),
        ({"q": Q.astype(np.float64)}, TypeError, "lse has dtype float32; it must be float64"),
        ({"dlse": DLSE[0]}, ValueError, r"dlse has shape \(4, 20\); it must be \(2, 4, 20\)"),
        ({"dlse": DLSE > 0}, TypeError, "dlse has dtype bool"),
        ({"wrt": "x"}, ValueError, "wrt has 'x'; it may name q, k, v, bias, sinks, alibi_slopes"),
        ({"wrt": ("q", "bias")}, ValueError, "wrt has 'bias', and there is no bias= in the call"),
        ({"dq": DOUT}, ValueError, r"dq has shape \(2, 4, 20, 7\) and dtype float32; they must be \(2, 4, 20, 8\)"),
        ({"dq": Q.tolist()}, TypeError, "dq is a list; it must be a NumPy array, or None"),
        ({"dv": V.astype(np.float64)}, ValueError, "dv has shape .* and dtype float64; they must be .* float32"),
        ({"dk": np.broadcast_to(K[:1], K.shape)}, ValueError, "dk is read-only"),
        ({"dk": np.lib.stride_tricks.as_strided(K.copy(), K.shape, (0, *K.strides[1:]))}, ValueError, "share memory"),
        ({"dk": K}, ValueError, "dk shares memory with k"),
        ({"dq": Q, "q": Q[:]}, ValueError, "dq shares memory with q"),
        ({"dv": DOUT.reshape(-1)[:840].reshape(V.shape)}, ValueError, "dv shares memory with dout"),
        ({"dq": np.empty_like(Q), "wrt": "k"}, ValueError, "dq= is given, and wrt leaves q out"),
        ({"score_mod": lambda s, *_: s}, TypeError, "score_mod is given; it may be any function.*bias="),
        ({"before": 1}, TypeError, "before is given; .*of the whole"),
        ({"return_lse": True}, TypeError, "unexpected keyword argument 'return_lse'"),
        ({"causal": "x"}, ValueError, "causal is 'x'"),
        ({"k": K[..., :3]}, ValueError, "q has width 8 and k has 3"),
        ({"mask": np.ones((7, 7), bool)}, ValueError, "mask has shape"),
        ({"num_threads": 0}, ValueError, "num_threads"),
    ],
)
def test_errors(either, change, error, words):
    call = {"dout": DOUT, "q": Q, "k": K, "v": V, "out": DOUT, "lse": DLSE}
    with pytest.raises(error, match=f"^attention_backward: .*{words}"):
        attention_backward(**{**call, **change})


def test_two_places_in_one(either):
    place = np.empty_like(K)
    with pytest.raises(ValueError, match="dv shares memory with dk"):
        backward(K[:, :, :20], K[:, :, :20], K, K.copy(), dk=place, dv=place)


def test_errors_of_vjp(either):
    with pytest.raises(ValueError, match=r"^attention_vjp: q has width"):
        attention_vjp(Q, K[..., :3], V)
    with pytest.raises(TypeError, match=r"^attention_vjp: unexpected keyword argument 'return_weights'"):
        attention_vjp(Q, K, V, return_weights=True)  # type: ignore[call-arg]
    _, vjp = attention_vjp(Q, K, V)
    with pytest.raises(ValueError, match=r"^attention_vjp: dout has shape"):
        vjp(Q)


def test_every_check_runs_before_any_work(either):
    place = np.full_like(Q, 7)
    with pytest.raises(ValueError, match="wrt has 'z'"):
        backward(DOUT, Q, K, V, wrt=("q", "z"), dq=place)
    assert (place == 7).all()


def test_errors_of_table_gradients():
    with pytest.raises(ValueError, match=r"^relative_bias_backward: dbias has shape \(3, 3\); it must be \(heads"):
        attentile.relative_bias_backward(np.ones((3, 3)), 1)
    with pytest.raises(TypeError, match=r"^t5_bias_backward: dbias has dtype int64; it must be floating"):
        attentile.t5_bias_backward(np.ones((1, 3, 3), int), 32)
    with pytest.raises(ValueError, match=r"^relative_bias_backward: max_distance is -1; it must be 0 or a positive"):
        attentile.relative_bias_backward(np.ones((1, 3, 3)), -1)
