"""Arguments that only look like numbers or arrays: text, truth values, masked arrays."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import dtype_of
from numpy.testing import assert_array_equal

import attentile
from attentile import KVCache, attention, onnx

X = np.eye(4)


@pytest.mark.parametrize("wrong", ["0.5", b"1", True, np.True_, np.array(True), np.array("0.5"), np.array(1.0, object)])
@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_text_and_truth_are_no_numbers(either, name, wrong):
    with pytest.raises(TypeError, match=f"^attention: {name} is .* must be a (positive )?number"):
        attention(X, X, X, **{name: wrong})


@pytest.mark.parametrize("right", [0.5, 1, np.float32(0.5), np.int8(1), np.array(0.5), np.array(1)])
def test_numbers_of_every_kind(either, right):
    assert_array_equal(attention(X, X, X, scale=right), attention(X, X, X, scale=float(right)))
    assert_array_equal(attention(X, X, X, softcap=right), attention(X, X, X, softcap=float(right)))


CALLS_OF_INTEGERS = {
    "num_threads": lambda: attention(X, X, X, num_threads=True),
    "window": lambda: attention(X, X, X, window=(True, False)),
    "batch": lambda: KVCache(True, 1, 4),
    "num_heads": lambda: attentile.MultiHeadAttention(X, X, X, X, num_heads=True),
    "seq_len": lambda: attentile.positional_encoding(True, 4),
    "set_num_threads": lambda: attentile.set_num_threads(True),
}


@pytest.mark.parametrize("name", CALLS_OF_INTEGERS)
def test_truth_is_no_integer(name):
    with pytest.raises(TypeError, match="must be"):
        CALLS_OF_INTEGERS[name]()


@pytest.mark.parametrize("name", ["q", "k", "v", "mask", "bias"])
def test_masked_arrays_are_refused_for_their_mask_would_be_lost(either, name):
    arrays = {"q": X, "k": X, "v": X, "mask": np.ones((4, 4), bool), "bias": X}
    arrays[name] = np.ma.array(arrays[name], mask=np.eye(4, dtype=bool))
    with pytest.raises(TypeError, match=rf"^attention: {name} is a masked array.*filled"):
        attention(**arrays)


def test_dtypes_without_a_common_one(either):
    x = np.ones((1, 2, 3, 4))
    half, brain = x.astype(np.float16), x.astype(dtype_of("bfloat16"))
    with pytest.raises(TypeError, match=r"^attention: NumPy has no common dtype of bfloat16, float16; convert with"):
        attention(half, brain, half)
    with pytest.raises(TypeError, match=r"^merge_attention: NumPy has no common dtype"):
        attentile.merge_attention([(half, x[..., 0]), (brain, x[..., 0])])


Y = np.ones((1, 2, 3, 4), np.float32)


WRONG_KINDS = {
    "onnx scale": (lambda: onnx.attention(Y, Y, Y, scale="1"), "onnx.attention: scale is '1'; it must be a number"),
    "onnx softcap": (
        lambda: onnx.attention(Y, Y, Y, softcap="1"),
        "onnx.attention: softcap is '1'; it must be a number",
    ),
    "onnx axis": (
        lambda: onnx.tensor_scatter(Y, Y, axis=2.0),
        "onnx.tensor_scatter: axis is 2.0; it must be an integer",
    ),
    "isa": (lambda: attentile.use_backend("compiled", 5), "use_backend: isa is 5; it must be the name"),
}


@pytest.mark.parametrize("name", WRONG_KINDS)
def test_messages_name_the_function_and_the_argument(compiled, name):
    call, message = WRONG_KINDS[name]
    with pytest.raises(TypeError, match=f"^{message}"):
        call()
