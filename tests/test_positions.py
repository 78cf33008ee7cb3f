"""positional_encoding() against 60 digits of mpmath; relative-position biases against dense gathers.

Every test runs on each implementation (fixture `impl`).
"""

from __future__ import annotations

import functools

import mpmath
import numpy as np
import pytest

from attentile import attention, positional_encoding, relative_bias, t5_bias, t5_buckets, use_backend

pytestmark = pytest.mark.usefixtures("impl")

WIDTHS = [1, 2, 3, 5, 7, 8, 64, 512, 513]
POSITIONS = [0, 1, 2, 63, 64, 65, 1000, 4095, 65535, 999_999, 10**6, -1, -63, -64, -65, -(10**6)]
TWO_ULP = 4.5e-16  # of 1.0: the promise. Measured: 2.6e-16, without FMA 2.9e-16, NumPy twin 1.3e-16.


@functools.cache
def exact(position: int, width: int, base: float = 10000.0) -> tuple[np.ndarray, np.ndarray]:
    """One row of the formula as the sum of two float64 rows."""
    high, low = np.zeros(width), np.zeros(width)
    with mpmath.workdps(60):
        for column in range(width):
            angle = position * mpmath.mpf(base) ** (mpmath.mpf(-2 * (column // 2)) / width)
            value = mpmath.cos(angle) if column % 2 else mpmath.sin(angle)
            high[column] = float(value)
            low[column] = float(value - mpmath.mpf(high[column]))
    return high, low


def error(row: np.ndarray, position: int, width: int, base: float = 10000.0) -> float:
    """Largest absolute error of a row, exact far below one ULP."""
    high, low = exact(position, width, base)
    assert row.shape == (width,)
    assert row.dtype == np.float64
    return float(np.abs((row - high) - low).max())


def plain(rows: int, width: int, offset: int = 0) -> np.ndarray:
    """The formula in plain float64."""
    column = np.arange(width)
    angle = (offset + np.arange(rows)[:, None]) * 10000.0 ** (-2 * (column // 2) / width)
    return np.where(column % 2, np.cos(angle), np.sin(angle))


# ---- values ----


@pytest.mark.parametrize("width", WIDTHS)
def test_error_is_below_two_ulp(width):
    worst = max(error(positional_encoding(1, width, offset=p)[0], p, width) for p in POSITIONS)
    assert worst <= TWO_ULP


def test_the_oracle_tells_plain_float64_from_right():
    assert error(plain(1, 64, 10**6)[0], 10**6, 64) > 1e-11


def test_error_inside_a_long_run():
    rows = positional_encoding(1000, 96, offset=999_500)
    assert max(error(rows[i], 999_500 + i, 96) for i in range(0, 1000, 37)) <= TWO_ULP


@pytest.mark.parametrize("width", [1023, 1030])
def test_error_in_every_strip_of_a_wide_row(width):
    rows = positional_encoding(3, width, offset=4094)
    assert max(error(rows[i], 4094 + i, width) for i in range(3)) <= TWO_ULP


@pytest.mark.parametrize("position", [10**9, -(10**9), 2**40 + 1, 2**50 - 1, -(2**50)])
@pytest.mark.parametrize("width", [7, 64])
def test_far_positions(position, width):
    assert error(positional_encoding(1, width, offset=position)[0], position, width) <= TWO_ULP


def test_far_positions_with_a_large_remainder():
    # Here the angle's low part is an eighth of a quarter turn: reduced once only, it left the polynomials' range.
    first = 2**50 - 3000
    rows = positional_encoding(3000, 2, offset=first)
    assert max(error(rows[i], first + i, 2) for i in range(2250, 2300)) <= TWO_ULP


@pytest.mark.parametrize("base", [1e300, 500_000, 2.0, 1.0, 0.5, 1e-6])
@pytest.mark.parametrize("width", [1, 7, 64])
def test_other_bases(base, width):
    for position in (1, 100, 99_999):
        row = positional_encoding(1, width, base=base, offset=position)[0]
        assert error(row, position, width, base) <= TWO_ULP


def test_values_never_leave_minus_one_to_one():
    # sin(78 / sqrt(base)) is 1 - 1e-17, and a rotation that is not clamped gives 1 + 2e-16.
    assert positional_encoding(1, 4, base=2465.752325119932, offset=78)[0, 2] == 1.0
    assert np.abs(positional_encoding(5000, 64)).max() <= 1.0


def test_agrees_with_the_plain_formula():
    np.testing.assert_allclose(positional_encoding(300, 130), plain(300, 130), rtol=0, atol=1e-13)


def test_position_zero_is_exact():
    row = positional_encoding(1, 9)[0]
    assert row.tolist() == [0, 1, 0, 1, 0, 1, 0, 1, 0]
    assert not np.signbit(row).any()


def test_b73_integers_give_floats():
    expected = plain(8, 256, 3)
    for integer in (np.int64, np.int32, np.uint8, int):
        found = positional_encoding(integer(8), integer(256) if integer is not np.uint8 else 256, offset=integer(3))
        assert found.dtype == np.float64
        assert np.abs(found[1]).min() > 0
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_b73_unsigned_offset_does_not_wrap():
    assert np.array_equal(positional_encoding(300, 4, offset=np.uint8(250)), positional_encoding(300, 4, offset=250))


def test_b105_odd_width():
    expected = [0.909297, -0.416147, 0.050217, 0.998738, 0.001262]
    np.testing.assert_allclose(positional_encoding(3, 5)[2], expected, rtol=0, atol=5e-7)


@pytest.mark.parametrize("width", [1, 2, 3, 5, 29])
def test_b105_shapes_of_odd_widths(width):
    found = positional_encoding(10_000, width)
    assert found.shape == (10_000, width)
    np.testing.assert_allclose(found, plain(10_000, width), rtol=0, atol=1e-11)


def test_b105_width_one_is_a_sine():
    np.testing.assert_allclose(positional_encoding(100, 1)[:, 0], np.sin(np.arange(100)), rtol=0, atol=TWO_ULP)


# ---- bits ----


@pytest.mark.parametrize("width", [1, 8, 37, 513, 1100])
@pytest.mark.parametrize("first", [0, -70, 999_990, 2**50 - 140])
def test_a_row_depends_on_its_position_only(width, first):
    whole = positional_encoding(140, width, offset=first)
    alone = np.concatenate([positional_encoding(1, width, offset=first + i) for i in range(140)])
    assert np.array_equal(whole, alone)
    parts = [positional_encoding(b - a, width, offset=first + a) for a, b in ((0, 3), (3, 66), (66, 140))]
    assert np.array_equal(whole, np.concatenate(parts))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("width", [1, 2, 3, 5, 7, 8, 9, 15, 17, 31, 64, 515])
def test_narrow_dtypes_are_rounded_once(width, dtype):
    found = positional_encoding(130, width, offset=-40, dtype=dtype)
    assert found.dtype == dtype
    assert np.array_equal(found, positional_encoding(130, width, offset=-40).astype(dtype))


def test_fma_isas_give_equal_bits():
    results = []
    for isa in ("avx2", "avx512"):
        try:
            with use_backend("compiled", isa=isa):
                results.append(positional_encoding(200, 77, offset=-100))
        except ValueError as error:
            pytest.skip(str(error))
    assert np.array_equal(*results)


# ---- shape, dtype, out ----


@pytest.mark.parametrize("width", [1, 5, 64])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, "float32", np.dtype("f8"), float])
def test_shape_and_dtype(width, dtype):
    for rows in (0, 1, 65):
        found = positional_encoding(rows, width, dtype=dtype)
        assert found.shape == (rows, width)
        assert found.dtype == np.dtype(dtype)


OUTS = {
    "contiguous": lambda room: room[:70, :9],
    "every second row": lambda room: room[:140:2, 2:11],
    "rows reversed": lambda room: room[69::-1, :9],
    "every second column": lambda room: room[:70, 1:19:2],
    "columns reversed": lambda room: room[:70, 8::-1],
    "transposed": lambda room: room[:9, :70].T,
}


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("layout", OUTS)
def test_out_of_any_strides(layout, dtype):
    room = np.full((150, 80), 7, dtype)
    out = OUTS[layout](room)
    assert positional_encoding(70, 9, dtype=dtype, offset=5, out=out) is out
    assert np.array_equal(out, positional_encoding(70, 9, dtype=dtype, offset=5))
    out[...] = 7
    assert (room == 7).all(), "written beside out"


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_misaligned_out(dtype):
    size = 70 * 9 * np.dtype(dtype).itemsize
    out = np.zeros(size + 1, np.uint8)[1:].view(dtype).reshape(70, 9)
    assert not out.flags.aligned
    assert positional_encoding(70, 9, dtype=dtype, out=out) is out
    assert np.array_equal(out, positional_encoding(70, 9, dtype=dtype))


def test_empty_out():
    out = np.empty((0, 4))
    assert positional_encoding(0, 4, out=out) is out


def read_only() -> np.ndarray:
    out = np.full((3, 4), 7.0)
    out.flags.writeable = False
    return out


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        (np.full((3, 5), 7.0), ValueError, r"out has shape \(3, 5\) .*; they must be \(3, 4\)"),
        (np.full((1, 3, 4), 7.0), ValueError, r"out has shape \(1, 3, 4\)"),
        (np.full((3, 4), 7, np.float32), ValueError, "out has .*dtype float32; they must be .* float64"),
        (np.full((3, 4), 7, np.int64), ValueError, "out has .*dtype int64"),
        (np.full((3, 4), 7, np.dtype("f8").newbyteorder()), ValueError, "out has .*dtype .f8"),
        (read_only(), ValueError, "out is read-only"),
        (np.lib.stride_tricks.as_strided(np.full(4, 7.0), (3, 4), (0, 8)), ValueError, "out has .* share memory"),
        ([[7.0] * 4] * 3, TypeError, "out is a list"),
    ],
)
def test_refused_out_is_not_written(out, error, message):
    with pytest.raises(error, match=f"^positional_encoding: {message}"):
        positional_encoding(3, 4, out=out)
    assert np.all(np.asarray(out) == 7)


# ---- errors ----


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"d_model": 0}, ValueError, "d_model is 0; it must be a positive integer"),
        ({"d_model": -4}, ValueError, "d_model is -4; it must be a positive integer"),
        ({"d_model": 4.0}, TypeError, "d_model is 4.0; it must be an integer"),
        ({"d_model": None}, TypeError, "d_model is None; it must be an integer"),
        ({"seq_len": -1}, ValueError, "seq_len is -1; it must be 0 or a positive integer"),
        ({"seq_len": "3"}, TypeError, "seq_len is '3'; it must be an integer"),
        ({"seq_len": np.arange(8)}, TypeError, "seq_len is array"),
        ({"offset": 0.5}, TypeError, "offset is 0.5; it must be an integer"),
        ({"offset": 2**50 - 2}, ValueError, "the positions from offset="),
        ({"offset": -(2**50) - 1}, ValueError, "the positions from offset="),
        ({"base": 0}, ValueError, "base is 0; it must be finite and positive"),
        ({"base": -1e4}, ValueError, "base is -10000.0; it must be finite and positive"),
        ({"base": np.inf}, ValueError, "base is inf; it must be finite and positive"),
        ({"base": np.nan}, ValueError, "base is nan; it must be finite and positive"),
        ({"base": 10**400}, ValueError, "base is 1000"),
        ({"base": "10000"}, TypeError, "base is '10000'; it must be a real number"),
        ({"base": 1j}, TypeError, "base is 1j; it must be a real number"),
        ({"base": True}, TypeError, "base is True; it must be a real number"),
        ({"base": 1e-300}, ValueError, "base is 1e-300, with which positions up to 3 turn"),
        ({"base": 0.5, "offset": 2**49}, ValueError, "base is 0.5, with which positions up to"),
        ({"dtype": np.int64}, TypeError, "dtype is int64; it must be float64, float32 or float16"),
        ({"dtype": np.complex128}, TypeError, "dtype is complex128"),
        ({"dtype": "bfloat17"}, TypeError, "dtype is 'bfloat17'"),
        ({"dtype": np.dtype("f4").newbyteorder()}, TypeError, "dtype is .f4"),
    ],
)
def test_errors_name_function_argument_and_way_out(arguments, error, message):
    out = np.full((3, 4), 7.0)
    with pytest.raises(error, match=f"^positional_encoding: {message}"):
        positional_encoding(**{"seq_len": 3, "d_model": 4, "out": out, **arguments})
    assert (out == 7).all()


def test_limits_are_inclusive():
    assert positional_encoding(3, 4, offset=2**50 - 3).shape == (3, 4)
    assert positional_encoding(3, 4, offset=-(2**50)).shape == (3, 4)
    assert np.isfinite(positional_encoding(2, 33, base=2.0**-49)).all()


def test_strict_floating_point_errors_of_the_caller_do_not_matter():
    with np.errstate(all="raise"):
        found = positional_encoding(4, 600, base=1e308, dtype=np.float64)
    assert np.isfinite(found).all()


# ---- relative-position bias ----


@functools.cache
def slow_bucket(distance: int, bidirectional: bool, num_buckets: int, max_distance: int) -> int:
    """The published rule, with its logarithms taken to 50 digits."""
    bucket = 0
    if bidirectional:
        num_buckets //= 2
        bucket = num_buckets if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    exact = num_buckets // 2
    if distance < exact:
        return bucket + distance
    with mpmath.workdps(50):
        share = mpmath.log(mpmath.mpf(distance) / exact) / mpmath.log(mpmath.mpf(max_distance) / exact)
        return bucket + min(exact + int(mpmath.floor(share * (num_buckets - exact) + 1e-40)), num_buckets - 1)


def memory(view: np.ndarray) -> int:
    """Numbers that the array at the end of the chain of bases owns."""
    while view.base is not None:
        view = view.base
    return view.size


def dense_bias(table: np.ndarray, queries: int, keys: int, q_start: int) -> np.ndarray:
    reach = table.shape[1] // 2
    bias = np.empty((len(table), queries, keys), table.dtype)
    for h, i, j in np.ndindex(bias.shape):
        bias[h, i, j] = table[h, min(max(j - (q_start + i), -reach), reach) + reach]
    return bias


@pytest.mark.parametrize(("queries", "keys", "q_start"), [(1, 1, 0), (5, 9, 0), (9, 5, -3), (1, 40, 39), (7, 7, 1000)])
@pytest.mark.parametrize("reach", [0, 2, 30])
def test_relative_bias_is_the_dense_gather(queries, keys, q_start, reach):
    table = np.random.default_rng(1).standard_normal((3, 2 * reach + 1))
    view = relative_bias(table, queries, keys, q_start=q_start)
    np.testing.assert_array_equal(view, dense_bias(table, queries, keys, q_start))
    assert not view.flags.writeable
    assert memory(view) == 3 * (queries + keys - 1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("make", ["relative", "t5", "t5 decoder"])
def test_attention_with_the_view_has_the_bits_of_the_dense_bias(dtype, make):
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((2, 3, n, 16)).astype(dtype) for n in (70, 300, 300))
    if make == "relative":
        bias = relative_bias(rng.standard_normal((3, 65)).astype(dtype), 70, 300, q_start=230)
    else:
        table = rng.standard_normal((32, 3)).astype(dtype)
        bias = t5_bias(table, 70, 300, bidirectional=make == "t5", q_start=230)
    assert bias.dtype == dtype
    assert bias.strides[1] == -bias.itemsize
    found = attention(q, k, v, bias=bias, causal="lower_right", scale=1.0)
    assert np.array_equal(found, attention(q, k, v, bias=bias.copy(), causal="lower_right", scale=1.0))
    assert not np.array_equal(found, attention(q, k, v, causal="lower_right", scale=1.0))


def test_memory_of_a_long_bias():
    view = t5_bias(np.ones((32, 8), np.float32), 100_000, 100_000)
    assert view.shape == (8, 100_000, 100_000)
    assert memory(view) == 8 * 199_999


def test_half_tables_become_float32():
    assert relative_bias(np.ones((1, 3), np.float16), 2, 2).dtype == np.float32


@pytest.mark.parametrize(("queries", "keys"), [(0, 4), (4, 0), (0, 0)])
def test_empty_bias(queries, keys):
    assert relative_bias(np.ones((2, 3)), queries, keys).shape == (2, queries, keys)
    assert t5_bias(np.ones((32, 2)), queries, keys).shape == (2, queries, keys)


def test_t5_buckets_by_hand():
    distances = [-1000, -128, -64, -32, -16, -8, -3, -2, -1, 0, 1, 2, 3, 7, 8, 11, 12, 16, 64, 91, 128, 1000]
    expected = [15, 15, 14, 12, 10, 8, 3, 2, 1, 0, 17, 18, 19, 23, 24, 24, 25, 26, 30, 31, 31, 31]
    np.testing.assert_array_equal(t5_buckets(distances), expected)
    decoder = t5_buckets([3, 0, -1, -15, -16, -18, -19, -112, -113, -1000], bidirectional=False)
    np.testing.assert_array_equal(decoder, [0, 0, 1, 15, 16, 16, 17, 30, 31, 31])


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (16, 64), (64, 1000), (4, 20), (320, 800)])
def test_t5_buckets_against_the_rule(bidirectional, num_buckets, max_distance):
    distances = np.r_[-1100:1101:3, -129:130]
    found = t5_buckets(distances, bidirectional=bidirectional, num_buckets=num_buckets, max_distance=max_distance)
    expected = [slow_bucket(int(d), bidirectional, num_buckets, max_distance) for d in distances]
    np.testing.assert_array_equal(found, expected)


def test_t5_buckets_of_any_integers():
    far = t5_buckets(np.array([-(2**63), 2**63 - 1]))
    np.testing.assert_array_equal(far, [15, 31])
    np.testing.assert_array_equal(t5_buckets(np.array([2**64 - 1, 3], np.uint64)), [31, 19])
    assert t5_buckets(np.zeros((2, 0, 3), np.int8)).shape == (2, 0, 3)


def test_t5_bias_is_the_dense_gather():
    table = np.random.default_rng(3).standard_normal((16, 2))
    for bidirectional in (True, False):
        view = t5_bias(table, 30, 50, bidirectional=bidirectional, max_distance=40, q_start=7)
        distance = np.arange(50) - (7 + np.arange(30)[:, None])
        bucket = t5_buckets(distance, bidirectional=bidirectional, num_buckets=16, max_distance=40)
        np.testing.assert_array_equal(view, np.moveaxis(table[bucket], -1, 0))
        assert memory(view) == 2 * 79


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: relative_bias(np.ones((2, 4)), 3, 3), ValueError, r"relative_bias: table has shape \(2, 4\); .*odd"),
        (lambda: relative_bias(np.ones(3), 3, 3), ValueError, r"relative_bias: table has shape \(3,\)"),
        (lambda: relative_bias([[1, 2, 3]], 3, 3), TypeError, "relative_bias: table has dtype int64"),
        (lambda: relative_bias(np.ones((2, 3)), -1, 3), ValueError, "relative_bias: queries is -1"),
        (lambda: relative_bias(np.ones((2, 3)), 3, 3.0), TypeError, "relative_bias: keys is 3.0"),
        (lambda: relative_bias(np.ones((2, 3)), 3, 3, q_start=[0]), TypeError, r"relative_bias: q_start is \[0\]"),
        (lambda: t5_bias(np.ones((31, 3)), 3, 3), ValueError, "t5_bias: num_buckets is 31; it must be even"),
        (lambda: t5_buckets([1.0]), TypeError, "t5_buckets: distances has dtype float64"),
        (lambda: t5_buckets([1], max_distance=8), ValueError, "t5_buckets: max_distance is 8; .*larger than 8"),
        (lambda: t5_buckets([1], num_buckets=1, bidirectional=False), ValueError, "num_buckets is 1; .*at least 2"),
        (lambda: t5_buckets([1], num_buckets=2.5), TypeError, "t5_buckets: num_buckets is 2.5"),
    ],
)
def test_bias_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_far_queries_do_not_wrap():
    found = relative_bias(np.array([[-1.0, 0.0, 1.0]]), 2, 2, q_start=2**70)
    assert (found == -1).all()
