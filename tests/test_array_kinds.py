"""Every array argument of every public function: what is an array and what is refused is the same everywhere.

CALLS has a call of each; what takes an array and is missing there is found by its signature.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import attentile as at
from attentile import onnx

Array = np.ndarray[Any, Any]

X = np.random.default_rng(0).standard_normal((2, 2, 4, 4))
ROW, M = X[0, 0], np.ones((4, 4), bool)
ANGLES = np.arange(8.0).reshape(4, 2)
W = {f"w_{name}": np.eye(4) for name in "qkvo"} | {f"b_{name}": np.zeros(4) for name in "qkvo"}
NORMS, NORM_BIASES = ({f"{bias}{name}_norm": np.ones(2) for name in "qk"} for bias in ("", "b_"))
PART = at.attention_partial(X, X, X)
RESULT = at.attention(X, X, X, return_lse=True)
SCORES = dict(bias=X, q_start=np.array([0, 1]), causal=True, sinks=np.zeros(2), alibi_slopes=np.ones(2), mask=M)
LENGTHS = dict(key_lengths=np.array([4, 3]), prefix_lengths=np.array([1, 2]), causal=True)
BACK = dict(dout=X, q=X, k=X, v=X, out=RESULT.out, lse=RESULT.lse, dlse=RESULT.lse)
PLACES = dict(dq=np.empty_like(X), dk=np.empty_like(X), dv=np.empty_like(X))
PAIR = dict(segments=(np.zeros((1, 4), int), np.zeros((2, 4), int)))


def cache(**options: Any) -> at.KVCache:
    made = at.KVCache(2, 2, 4, dtype=np.float64, **options)
    made.append(X, X)
    return made


def vjp(dout: Any, dlse: Any, dq: Any, dk: Any, dv: Any, **call: Any) -> Any:
    out, back = at.attention_vjp(**call)
    return out, back(dout, dlse, dq=dq, dk=dk, dv=dv)


def layer(**options: Any) -> at.MultiHeadAttention:
    return at.MultiHeadAttention(**W, num_heads=2, **options)


def attend(**options: Any) -> Any:
    return cache().attend(**options)


def rotary_cache(cos: Any, sin: Any) -> Any:
    made = at.KVCache(2, 2, 4, rotary={"cos": cos, "sin": sin})
    return made.append(X, X)


def from_arrays(arrays: Any) -> Any:
    return at.MultiHeadAttention.from_arrays(arrays, num_heads=2)


CHECKPOINT = {f"{name}_proj.weight": np.eye(4) for name in "qkvo"} | {
    f"{name}_proj.bias": np.zeros(4) for name in "qkvo"
}
QKV = dict(q=X, k=X, v=X)
CALLS: dict[str, list[tuple[Callable[..., Any], dict[str, Any]]]] = {
    "attention": [
        (at.attention, {**QKV, **SCORES, "before": PART, "out": np.empty_like(X)}),
        (at.attention, {**QKV, **LENGTHS, "segments": np.zeros((2, 4), int)}),
        (at.attention, {**QKV, **PAIR}),
    ],
    "attention_backward": [
        (at.attention_backward, {**BACK, **SCORES, **PLACES}),
        (at.attention_backward, {**BACK, **LENGTHS, **PAIR}),
    ],
    "attention_vjp": [(vjp, {**QKV, **SCORES, "dout": X, "dlse": RESULT.lse, **PLACES})],
    "attention_partial": [
        (at.attention_partial, {**QKV, **{k: v for k, v in SCORES.items() if k != "sinks"}, "before": PART}),
        (at.attention_partial, {**QKV, **LENGTHS, **PAIR}),
    ],
    "attention_stats": [
        (at.attention_stats, {**QKV, **SCORES, "which": "rows", "rows": np.array([0])}),
        (at.attention_stats, {**QKV, **LENGTHS, **PAIR}),
    ],
    "explain": [(at.explain, {**QKV, **SCORES, "out": np.empty_like(X)}), (at.explain, {**QKV, **LENGTHS, **PAIR})],
    "draw_mask": [
        (at.draw_mask, dict(queries=4, keys=4, mask=M, segments=np.zeros(4, int))),
        (at.draw_mask, dict(queries=4, keys=4, segments=(np.zeros(4, int), np.zeros(4, int)))),
    ],
    "merge_attention": [
        (at.merge_attention, dict(parts=[(RESULT.out, RESULT.lse), (RESULT.out, RESULT.lse)])),
        (at.merge_attention, dict(parts=[PART, PART])),
    ],
    "self_attention": [(at.self_attention, dict(Q=X, K=X, V=X, d_k=4, mask=M))],
    "causal_attention": [(at.causal_attention, dict(Q=X, K=X, V=X, d_k=4))],
    "multi_head_attention": [
        (
            at.multi_head_attention,
            dict(x=ROW, d_model=4, num_heads=2, mask=M)
            | {f"W_{name}": np.eye(4) for name in "qkvo"}
            | {f"b_{name}": np.zeros(4) for name in "qkvo"},
        )
    ],
    "segment_ids": [
        (at.segment_ids, dict(lengths=np.array([1, 2]))),
        (at.segment_ids, dict(cu_seqlens=np.array([0, 1, 3]))),
    ],
    "positional_encoding": [(at.positional_encoding, dict(seq_len=4, d_model=4, out=np.empty((4, 4))))],
    "relative_bias": [(at.relative_bias, dict(table=np.zeros((2, 7)), queries=4, keys=4))],
    "relative_bias_backward": [(at.relative_bias_backward, dict(dbias=X[0], max_distance=1))],
    "t5_bias_backward": [(at.t5_bias_backward, dict(dbias=X[0], num_buckets=32))],
    "t5_bias": [(at.t5_bias, dict(table=np.zeros((32, 2)), queries=4, keys=4))],
    "t5_buckets": [(at.t5_buckets, dict(distances=np.arange(4)))],
    "rotary_embedding": [
        (at.rotary_embedding, dict(x=X, positions=np.arange(4), out=np.empty_like(X))),
        (at.rotary_embedding, dict(x=X, cos=np.cos(ANGLES), sin=np.sin(ANGLES))),
    ],
    "KVCache.__init__": [(rotary_cache, dict(cos=np.cos(ANGLES), sin=np.sin(ANGLES)))],
    "KVCache.append": [(lambda **given: at.KVCache(2, 2, 4).append(**given), dict(k=X, v=X, lengths=np.array([4, 2])))],
    "KVCache.attend": [
        (attend, {"q": X, **SCORES, "out": np.empty_like(X)}),
        (attend, {"q": X, "key_lengths": np.array([4, 3]), "segments": np.zeros((2, 4), int)}),
    ],
    "KVCache.truncate": [(lambda length: cache().truncate(length), dict(length=np.array([1, 2])))],
    "KVCache.reorder": [(lambda beam_index: cache().reorder(beam_index), dict(beam_index=np.array([1, 0])))],
    "MultiHeadAttention.__init__": [
        (
            at.MultiHeadAttention,
            {**W, "num_heads": 2, "sinks": np.zeros(2), **NORMS, "norm": {"kind": "rms", "eps": 1e-6}},
        ),
        (at.MultiHeadAttention, {**W, "num_heads": 2, **NORMS, **NORM_BIASES, "norm": {"kind": "layer", "eps": 1e-6}}),
    ],
    "MultiHeadAttention.from_arrays": [(from_arrays, dict(arrays=CHECKPOINT))],
    "MultiHeadAttention.__call__": [
        (
            lambda **given: layer(rotary={"base": 10000.0})(**given),
            dict(x=X[0], positions=np.arange(4), out=np.empty((2, 4, 4)), mask=M),
        ),
        (
            lambda **given: layer()(cache=at.KVCache(2, 2, 2), **given),
            dict(x=X[0], lengths=np.array([4, 3])),
        ),
        (lambda **given: layer()(**given), dict(x=X[0], context=X[0])),
        (lambda **given: layer()(**given), dict(x=X[0], context=(X[..., :2], X[..., :2]), bias=X)),
    ],
    "MultiHeadAttention.vjp": [
        (
            lambda dout, **given: layer(rotary={}).vjp(**given)[1](dout),
            dict(x=X[0], positions=np.arange(4), mask=M, bias=X, dout=X[0]),
        ),
        (lambda **given: layer().vjp(**given)[1](X[0]), dict(x=X[0], context=X[0])),
        (lambda **given: layer().vjp(**given)[1](X[0]), dict(x=X[0], context=(X[..., :2], X[..., :2]))),
    ],
    "MultiHeadAttention.keys_values": [(lambda context: layer().keys_values(context), dict(context=X[0]))],
    "onnx.attention": [
        (onnx.attention, dict(Q=X, K=X, V=X, attn_mask=M, nonpad_kv_seqlen=np.array([4, 3]))),
        (onnx.attention, dict(Q=X, K=X, V=X, past_key=X, past_value=X)),
    ],
    "onnx.rotary_embedding": [
        (
            onnx.rotary_embedding,
            dict(X=X, cos_cache=np.cos(ANGLES), sin_cache=np.sin(ANGLES), position_ids=np.zeros((2, 4), int)),
        )
    ],
    "onnx.tensor_scatter": [
        (onnx.tensor_scatter, dict(past_cache=X, update=X[:, :, :2], write_indices=np.array([0, 1])))
    ],
}


def public() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Functions and methods that people call, by the names in CALLS."""
    for home, prefix in ((at, ""), (onnx, "onnx.")):
        for name in home.__all__:
            found = getattr(home, name)
            if inspect.isfunction(found):
                yield prefix + name, found
            elif inspect.isclass(found) and not issubclass(found, (tuple, onnx.Attention)):
                for method in vars(found):
                    if callable(getattr(found, method)) and (method[0] != "_" or method in ("__init__", "__call__")):
                        yield f"{name}.{method}", getattr(found, method)


def array_arguments(function: Callable[..., Any]) -> set[str]:
    """Parameters whose annotations name arrays."""
    words = ("Array", "Segments", "Partial", "Part]")
    given = inspect.signature(function).parameters.values()
    return {p.name for p in given if any(word in str(p.annotation) for word in words)}


def leaves(value: Any, rest: Callable[[Any], Any] = lambda x: x) -> Iterator[tuple[Array, Callable[[Any], Any]]]:
    """(array, what puts another one in its place) of every array in an argument."""
    if isinstance(value, np.ndarray):
        yield value, rest
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, lambda x, key=key: rest({**value, key: x}))
    elif isinstance(value, at.Partial):
        for name, item in value._asdict().items():
            yield from leaves(item, lambda x, name=name: rest(value._replace(**{name: x})))
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from leaves(item, lambda x, i=i: rest(type(value)([*value[:i], x, *value[i + 1 :]])))


def places() -> Iterator[Any]:
    """Every array of every call."""
    for name, calls in CALLS.items():
        for n, (function, arguments) in enumerate(calls):
            for argument, value in arguments.items():
                for i, (array, put) in enumerate(leaves(value)):
                    called = lambda x, f=function, a=arguments, k=argument, put=put: f(**{**a, k: put(x)})  # noqa: E731
                    yield pytest.param(argument, array, called, id=f"{name}-{n}-{argument}-{i}")


EVERY = pytest.mark.parametrize(("argument", "array", "call"), list(places()))


def test_every_public_array_argument_is_here():
    found = dict(public())
    assert len(found) > 25
    missing = {}
    for name, function in found.items():
        here = {argument for _, arguments in CALLS.get(name, []) for argument in arguments}
        here |= {"rotary", "arrays"} if name.endswith(("__init__", "from_arrays")) else set()
        missing[name] = array_arguments(function) - here
    assert not {name: arguments for name, arguments in missing.items() if arguments}


@EVERY
def test_the_call_runs(argument, array, call):
    call(array)


@EVERY
def test_masked_arrays_are_refused(argument, array, call):
    """Their mask would be lost silently."""
    with pytest.raises(TypeError, match="masked array"):
        call(np.ma.masked_array(array, np.zeros(array.shape, bool)))


@EVERY
def test_text_bytes_and_objects_are_refused(argument, array, call):
    for wrong in (b"ab", np.full(array.shape, "1"), array.astype(object)):
        if argument in ("past_cache", "update"):  # of any dtype, as long as both have the same
            continue
        with pytest.raises((TypeError, ValueError)):
            call(wrong)


class Duck:
    """Something that NumPy can make an array of."""

    def __init__(self, array: Array) -> None:
        self.array = array

    def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
        return self.array


def same(a: Any, b: Any) -> None:
    """Equal results of any kind; objects without arrays need only be of the same type."""
    assert type(a) is type(b)
    if isinstance(a, np.ndarray):
        np.testing.assert_array_equal(a, b)
    elif isinstance(a, tuple):
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif isinstance(a, dict):
        same(tuple(a.values()), tuple(b.values()))


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@EVERY
def test_whatever_numpy_reads_as_an_array_is_one(argument, array, call):
    kinds: list[Callable[[Array], Any]] = [memoryview, Duck, np.ndarray.tolist]
    if array.ndim == 2:
        kinds.append(np.matrix)
    if argument in ("out", "dq", "dk", "dv") and array is not RESULT.out:  # it is written to
        for kind in kinds[:3]:
            with pytest.raises(TypeError, match="must be a NumPy array"):
                call(kind(array))
        return
    if argument in ("cos", "sin"):  # a cache copies its tables, and Python has no copy of a memoryview
        kinds.remove(memoryview)
    want = call(array)
    for kind in kinds:
        same(call(kind(array)), want)
