"""positional_encoding() against 60 digits of mpmath. Every test runs on each implementation (fixture `impl`)."""

from __future__ import annotations

import functools

import mpmath
import numpy as np
import pytest

from attentile import positional_encoding, use_backend

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
        (np.full((3, 5), 7.0), ValueError, r"out has shape \(3, 5\); it must be .*\(3, 4\)"),
        (np.full((1, 3, 4), 7.0), ValueError, r"out has shape \(1, 3, 4\)"),
        (np.full((3, 4), 7, np.float32), TypeError, "out has dtype float32 and dtype is float64"),
        (np.full((3, 4), 7, np.int64), TypeError, "out has dtype int64"),
        (np.full((3, 4), 7, np.dtype("f8").newbyteorder()), TypeError, "out has dtype .f8"),
        (read_only(), ValueError, "out is read-only"),
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
