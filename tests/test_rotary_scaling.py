"""rotary_embedding(scaling=): each method against its formula written again here in mpmath; and every error.

Every test runs on the NumPy twin and on the compiled core (fixture `either`).
"""

from __future__ import annotations

from typing import Any

import mpmath
import numpy as np
import pytest
from rotary_oracle import exact_error, plain, rotated

from attentile import rotary_embedding

pytestmark = pytest.mark.usefixtures("either")

mp = mpmath.mp.clone()
mp.dps = 40


def frequencies(dim: int, base: float = 10000.0) -> list[Any]:
    return [mp.mpf(base) ** (-mp.mpf(2 * i) / dim) for i in range(dim // 2)]


def yarn(dim: int, base: float, factor: float, trained: int, fast: float, slow: float, truncate: bool) -> list[Any]:
    """Peng et al. 2023, section 3.2, as published models round the two boundaries."""

    def pair_with(turns: float) -> Any:  # solves trained / wavelength(pair) = turns
        return dim * mp.log(trained / (turns * 2 * mp.pi)) / (2 * mp.log(base))

    low, high = pair_with(fast), pair_with(slow)
    if truncate:
        low, high = mp.floor(low), mp.ceil(high)
    low, high = max(low, mp.mpf(0)), min(high, mp.mpf(dim - 1))
    high = high + mp.mpf("0.001") if low == high else high
    found = []
    for i, f in enumerate(frequencies(dim, base)):
        kept = 1 - min(mp.mpf(1), max(mp.mpf(0), (i - low) / (high - low)))
        found.append(kept * f + (1 - kept) * f / factor)
    return found


def llama3(dim: int, base: float, factor: float, low: float, high: float, trained: int) -> list[Any]:
    found = []
    for f in frequencies(dim, base):
        wavelength = 2 * mp.pi / f
        if wavelength < mp.mpf(trained) / high:
            found.append(f)
        elif wavelength > mp.mpf(trained) / low:
            found.append(f / factor)
        else:
            smooth = (trained / wavelength - low) / (high - low)
            found.append((1 - smooth) * f / factor + smooth * f)
    return found


def error(found: np.ndarray, x: np.ndarray, position: int, turns: list[Any], scale: Any = 1) -> float:
    """Largest error of one row (D,), halves, against 40 digits."""
    pairs, worst = len(turns), mp.mpf(0)
    for i, f in enumerate(turns):
        z = mp.mpc(float(x[i]), float(x[i + pairs])) * mp.expj(position * f) * scale
        worst = max(worst, abs(z.real - float(found[i])), abs(z.imag - float(found[i + pairs])))
    return float(worst)


def check(
    scaling: dict[str, Any], turns: list[Any], *, scale: Any = 1, base: float | None = None, at: Any = (0, 1, 777)
) -> None:
    """Rows alone, so that the length of the call is position + 1; error below 4 units in the last place of 1."""
    dim = 2 * len(turns)
    for position in at:
        x = np.random.default_rng(abs(position)).uniform(-1, 1, (1, dim))
        call = dict(scaling=scaling) if base is None else dict(scaling=scaling, base=base)
        found = rotary_embedding(x, position, **call)
        assert error(found[0], x[0], position, turns, scale) <= 4 * 2.0**-52 * max(1.0, float(scale))
        back = rotary_embedding(found, position, inverse=True, **call)
        np.testing.assert_allclose(back, x, rtol=0, atol=1e-15)


FAR = (0, 1, 5000, 10**6, -(10**6))


def test_default():
    for name in ("type", "rope_type"):
        check({name: "default"}, frequencies(16), at=FAR)
    check({"type": "default", "rope_type": "default", "rope_theta": 5e5, "factor": None}, frequencies(16, 5e5), at=FAR)
    check({"type": "default", "rope_theta": 5e5}, frequencies(16, 5e5), base=5e5)
    # One position for all sections is a token of text.
    for section in ({"mrope_section": [2, 3, 3]}, {"mrope_section": [2, 3, 3], "mrope_interleaved": True}):
        check({"type": "default", **section}, frequencies(16), at=FAR)
        check({"type": "mrope", **section}, frequencies(16), at=FAR)


@pytest.mark.parametrize("factor", [1, 1.0, 4.0, 2.5])
def test_linear(factor):
    check({"rope_type": "linear", "factor": factor}, [f / factor for f in frequencies(32)], at=FAR)


@pytest.mark.parametrize(("dim", "base"), [(2, 10000.0), (4, 10000.0), (64, 1000.0)])
def test_ntk(dim, base):
    grown = base if dim == 2 else mp.mpf(base) * mp.mpf(8) ** (mp.mpf(dim) / (dim - 2))
    check({"type": "ntk", "factor": 8.0}, frequencies(dim, grown), base=base, at=FAR)


@pytest.mark.parametrize("key", ["original_max_position_embeddings", "max_position_embeddings"])
@pytest.mark.parametrize(("dim", "base"), [(2, 1000.0), (64, 1000.0), (10, 10000.0)])
def test_dynamic(key, dim, base):
    scaling = {"rope_type": "dynamic", "factor": 2.0, key: 2048}
    check(scaling, frequencies(dim, base), base=base, at=(-9000, 0, 1, 511, 2047))
    for length in (2049, 4096, 10**6):
        grown = (
            mp.mpf(base) if dim == 2 else mp.mpf(base) * (2 * mp.mpf(length) / 2048 - 1) ** (mp.mpf(dim) / (dim - 2))
        )
        check(scaling, frequencies(dim, grown), base=base, at=(length - 1,))


def test_dynamic_takes_the_largest_position_of_the_call():
    scaling = {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8}
    x = np.random.default_rng(0).uniform(-1, 1, (2, 1, 3, 6))
    grown = 10000 * (2 * 20 / 8 - 1) ** (6 / 4)
    for positions in ([[3, 19, 0], [1, 2, 3]], [19, 0, -40], 17):
        where = np.arange(17, 20) if positions == 17 else np.array(positions)
        wanted = rotated(x, where, plain(6, grown))
        np.testing.assert_allclose(rotary_embedding(x, positions, scaling=scaling), wanted, rtol=0, atol=1e-13)
    np.testing.assert_array_equal(rotary_embedding(x, 5, scaling=scaling), rotary_embedding(x, 5))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


@pytest.mark.parametrize("dim", [2, 4, 32, 64, 128])
@pytest.mark.parametrize(("base", "trained"), [(10000.0, 2048), (500_000.0, 32768), (10.0, 4), (10.0, 600)])
@pytest.mark.parametrize("truncate", [True, False])
def test_yarn(dim, base, trained, truncate):
    scaling = {**YARN, "original_max_position_embeddings": trained}
    scaling |= {} if truncate else {"truncate": False}
    turns = yarn(dim, base, 4.0, trained, 32, 1, truncate)
    check(scaling, turns, scale=1 + mp.mpf("0.1") * mp.log(4), base=base, at=(0, 1, 5000, -(10**6)))


def test_yarn_options():
    turns = yarn(64, 10000.0, 40.0, 4096, 24, 3, True)
    scaling = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 24, "beta_slow": 3}
    check(scaling, turns, scale=1 + mp.mpf("0.1") * mp.log(40))
    check({**scaling, "attention_factor": 1.5}, turns, scale=1.5)
    both = (1 + mp.mpf("0.1") * mp.mpf(1.5) * mp.log(40)) / (1 + mp.mpf("0.1") * mp.mpf(0.5) * mp.log(40))
    check({**scaling, "mscale": 1.5, "mscale_all_dim": 0.5}, turns, scale=both)
    check({**scaling, "mscale": 0.707, "mscale_all_dim": 0.707, "attention_factor": 1.0}, turns)
    plain = 1 + mp.mpf("0.1") * mp.log(40)
    check({**scaling, "mscale": 1, "mscale_all_dim": 0}, turns, scale=plain)
    # Of one alone, where every reading gives the same, or the factor is there.
    check({**scaling, "mscale": 1.0}, turns, scale=plain)
    check({**scaling, "mscale_all_dim": 0.0}, turns, scale=plain)
    check({**scaling, "mscale_all_dim": 1.0, "attention_factor": 1.5}, turns, scale=1.5)
    check({**scaling, "finetuned": True}, turns, scale=plain)
    check({**scaling, "max_position_embeddings": 163840}, turns, scale=1 + mp.mpf("0.1") * mp.log(40))
    no_factor = {key: value for key, value in scaling.items() if key != "factor"}
    check({**no_factor, "max_position_embeddings": 163840}, turns, scale=1 + mp.mpf("0.1") * mp.log(40))
    check({**scaling, "factor": 1.0}, frequencies(64))


@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_longrope(kind):
    short, long = [1.0, 1.05, 1.25, 2.0], [1.0, 4.0, 16.5, 30.0]
    scaling = {
        "type": kind, "short_factor": short, "long_factor": np.array(long), "original_max_position_embeddings": 4096,
    }  # fmt: skip
    near, far = ([f / mp.mpf(x) for f, x in zip(frequencies(8), divisors, strict=True)] for divisors in (short, long))
    scale = mp.sqrt(1 + mp.log(32) / mp.log(4096))
    for given in (
        {"factor": 32.0},
        {"max_position_embeddings": 131072},
        {"factor": 32, "max_position_embeddings": 131072},
    ):
        check(scaling | given, near, scale=scale, at=(0, 5, 4095))
        check(scaling | given, far, scale=scale, at=(4096, 10**6))
    check(scaling | {"attention_factor": 1.25}, near, scale=1.25)
    check(scaling | {"factor": 1.0}, far, at=(5000,))
    check(scaling | {"max_position_embeddings": 2048}, near)
    derived = {key: value for key, value in scaling.items() if key != "original_max_position_embeddings"}
    derived |= {"max_position_embeddings": 131072, "factor": 32.0}  # trained with 4096
    growth = mp.sqrt(1 + mp.log(32) / mp.log(4096))
    check(derived, near, scale=growth, at=(4095,))
    check(derived, far, scale=growth, at=(4096,))
    weights = {"short_mscale": 1.1, "long_mscale": 1.25}
    check(scaling | weights, near, scale=1.1, at=(4095,))
    check(scaling | weights, far, scale=1.25, at=(4096,))


@pytest.mark.parametrize(("dim", "base"), [(128, 500_000.0), (64, 10000.0), (8, 3.0)])
def test_llama3(dim, base):
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    check(scaling, llama3(dim, base, 8, 1, 4, 8192), base=base, at=FAR)


def test_partial_rotary_factor():
    x = np.random.default_rng(0).uniform(-1, 1, (3, 20))
    found = rotary_embedding(x, 9, scaling={"rope_type": "default", "partial_rotary_factor": 0.5})
    np.testing.assert_array_equal(found, rotary_embedding(x, 9, rotary_dim=10))
    same = rotary_embedding(x, 9, rotary_dim=10, scaling={"rope_type": "default", "partial_rotary_factor": 0.5})
    np.testing.assert_array_equal(found, same)


def test_this_error_measure_sees_a_difference():
    x = np.ones((1, 8))
    found = rotary_embedding(x, 777, scaling={"type": "linear", "factor": 1.001})
    assert error(found[0], x[0], 777, frequencies(8)) > 1e-3
    assert exact_error(found[0], x[0], 777) > 1e-3


# ---- errors: function, argument, found, wanted; nothing is written ----

X = np.zeros((2, 3, 4, 8), np.float32)
T = np.ones((6, 4))
LONG = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 64}
LLAMA = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA |= {"original_max_position_embeddings": 8192}


def read_only() -> np.ndarray:
    out = np.zeros_like(X)
    out.flags.writeable = False
    return out


def strided(*strides: int) -> np.ndarray:
    return np.lib.stride_tricks.as_strided(np.zeros(1000, np.float32), X.shape, strides)


ARGUMENTS = [
    ({"x": np.zeros(8)}, ValueError, r"x has shape \(8,\); it needs at least two axes"),
    ({"x": X.astype(complex)}, TypeError, "an array has dtype complex128"),
    *(
        ({"x": X.astype(x)}, TypeError, "an array has dtype (longdouble|float128)")
        for x in [np.longdouble]
        if np.dtype(x) != np.float64  # on Windows and on Apple's processors it is the same
    ),
    ({"x": X[..., :7]}, ValueError, "the last axis of x is 7; the number .* must be even.*rotary_dim=6"),
    ({"x": X[..., :1]}, ValueError, "the last axis of x is 1; x needs at least two elements"),
    ({"x": X[..., :0]}, ValueError, "the last axis of x is 0; x needs at least two elements"),
    ({"rotary_dim": 3}, ValueError, "rotary_dim is 3; .* even, positive and at most 8"),
    ({"rotary_dim": 10}, ValueError, "rotary_dim is 10; .* at most 8"),
    ({"rotary_dim": 0}, ValueError, "rotary_dim is 0; "),
    ({"rotary_dim": -2}, ValueError, "rotary_dim is -2; "),
    ({"rotary_dim": 4.0}, TypeError, "rotary_dim is 4.0; it must be an integer"),
    ({"rotary_dim": True}, TypeError, "rotary_dim is True; it must be an integer"),
    ({"interleaved": 1}, TypeError, "interleaved is 1; it must be True or False"),
    ({"inverse": "no"}, TypeError, "inverse is 'no'; it must be True or False"),
    ({"base": 0}, ValueError, "base is 0; it must be finite and positive"),
    ({"base": -1e4}, ValueError, "base is -10000.0"),
    ({"base": np.inf}, ValueError, "base is inf"),
    ({"base": np.nan}, ValueError, "base is nan"),
    ({"base": 10**400}, ValueError, "base is 1000"),
    ({"base": "10000"}, TypeError, "base is '10000'; it must be a real number"),
    ({"base": True}, TypeError, "base is True"),
    ({"base": None}, TypeError, "base is None"),
    ({"base": 1e-300}, ValueError, "base is 1e-300, with which positions up to 3 turn by more"),
    ({"base": 0.1, "positions": 2**49}, ValueError, "base is 0.1, with which positions up to"),
    ({"positions": 1.0}, TypeError, "positions has dtype float64; positions must be integers"),
    ({"positions": np.array(2.5)}, TypeError, "positions is (np.float64.)?2.5.?; it must be an integer"),
    ({"positions": True}, TypeError, "positions is True; it must be an integer"),
    ({"positions": np.array(True)}, TypeError, "positions is .*True"),
    ({"positions": np.ones(4, bool)}, TypeError, "positions has dtype bool"),
    ({"positions": np.arange(4.0)}, TypeError, "positions has dtype float64"),
    ({"positions": [0, 1, 2, 2**70]}, TypeError, "positions has dtype object"),
    ({"positions": "0123"}, TypeError, "positions has dtype <U4"),
    ({"positions": np.arange(5)}, ValueError, r"positions has shape \(5,\); its last axis must be L = 4"),
    ({"positions": [3]}, ValueError, r"positions has shape \(1,\); its last axis must be L = 4"),
    ({"positions": [[0], [1]]}, ValueError, r"positions has shape \(2, 1\); .*an int is the position of the first row"),
    ({"positions": np.zeros((3, 4), int)}, ValueError, r"positions has shape \(3, 4\); .* broadcast to \(2, 4\)"),
    ({"positions": np.zeros((2, 1, 4), int)}, ValueError, r"positions has shape \(2, 1, 4\)"),
    ({"positions": [0, 1, 2, 2**50 + 1]}, ValueError, "positions run from 0 to 1125899906842625; .* 2\\*\\*50"),
    ({"positions": np.array([0, 1, 2, 2**64 - 1], np.uint64)}, ValueError, "positions run from 0 to 18446744073"),
    ({"positions": [0, 1, 2, -(2**63)]}, ValueError, "positions run from -9223372036854775808 to 2"),
    ({"positions": 2**50 - 2}, ValueError, "positions=1125899906842622 puts 4 rows at positions up to"),
    ({"positions": -(2**50) - 1}, ValueError, "positions=-1125899906842625 puts 4 rows"),
    ({"positions": 2**80}, ValueError, "positions=1208925819614629174706176"),
    ({"out": [[0.0]]}, TypeError, "out is a list; it must be a NumPy array"),
    ({"out": np.zeros((2, 3, 4, 9), np.float32)}, ValueError, r"out has shape \(2, 3, 4, 9\) and dtype float32;"),
    ({"out": np.zeros(X.shape)}, ValueError, "out has shape .* and dtype float64; they must be .* float32"),
    ({"out": np.zeros(X.shape, ">f4")}, ValueError, "out has shape .* and dtype >f4"),
    ({"out": read_only()}, ValueError, "out is read-only"),
    ({"out": strided(384, 128, 0, 4)}, ValueError, "out has shape .* so that elements share memory"),
    ({"out": strided(384, 128, 4, 4)}, ValueError, "out has shape .* so that elements share memory"),
    ({"cos": T}, ValueError, "cos is given without sin"),
    ({"sin": T}, ValueError, "sin is given without cos"),
    ({"cos": T, "sin": T[:5]}, ValueError, r"cos has shape \(6, 4\) and sin \(5, 4\)"),
    ({"cos": T[:, :3], "sin": T[:, :3]}, ValueError, r"cos has shape \(6, 3\); it must be .*\(positions, 4\)"),
    ({"cos": np.ones((6, 8)), "sin": np.ones((6, 8))}, ValueError, r"cos has shape \(6, 8\); .*give the first half"),
    ({"cos": T[0], "sin": T[0]}, ValueError, r"cos has shape \(4,\)"),
    ({"cos": T.astype(int), "sin": T}, TypeError, "cos has dtype int64; it must be float64"),
    ({"cos": T, "sin": T.astype(complex)}, TypeError, "sin has dtype complex128"),
    ({"cos": T, "sin": T, "base": 5.0}, ValueError, "base is given with cos and sin"),
    ({"cos": T, "sin": T, "scaling": YARN}, ValueError, "scaling is given with cos and sin"),
    ({"cos": T, "sin": T, "positions": 3}, IndexError, "positions run from 3 to 6 and the tables have 6 rows"),
    ({"cos": T, "sin": T, "positions": -1}, IndexError, "positions run from -1 to 2"),
    ({"cos": T, "sin": T, "positions": [0, 1, 2, -6]}, IndexError, "positions run from -6 to 2 .* between 0 and 5"),
    ({"cos": T * [0, 1, 1, 1], "sin": T * [0, 1, 1, 1], "inverse": True}, ValueError, "inverse=True cannot .* pair 0"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "kind", "message"), ARGUMENTS)
def test_errors_of_arguments(arguments, kind, message):
    out = np.full(X.shape, 7, np.float32)
    with pytest.raises(kind, match=f"^rotary_embedding: ({message})"):
        rotary_embedding(**{"x": X, "out": out, **arguments})
    assert (out == 7).all()


SCALINGS = [
    ("yarn", TypeError, "scaling is a str; it must be a dictionary"),
    ({}, ValueError, r"scaling has neither 'rope_type' nor 'type' \(its keys: \[\]\)"),
    ({"factor": 2.0}, ValueError, "scaling has neither .*'factor'.* default, linear, ntk, dynamic, yarn"),
    ({"type": "axial"}, ValueError, "scaling has type 'axial'; it must be one of default"),
    ({"type": "default", "mrope_section": 8}, TypeError, r"scaling\['mrope_section'\] is 8; it must be a list"),
    ({"type": "default", "mrope_section": [1, 2.5]}, TypeError, r"\['mrope_section'\]\[1\] is 2.5; it must be a"),
    ({"type": "linear", "factor": 2.0, "mrope_section": [8]}, ValueError, r"keys \['mrope_section'\], which 'linear'"),
    ({**YARN, "finetuned": 1}, TypeError, r"scaling\['finetuned'\] is 1; it must be True or False"),
    ({"type": "su", "short_factor": [1.0] * 4, "long_factor": [1.0] * 4, "factor": 2.0}, ValueError,
     r"lacks \['original_max_position_embeddings'\] \(models have it at the top level of their configuration\)"),
    ({"type": ["yarn"]}, ValueError, r"scaling has type \['yarn'\]; it must be one of"),
    ({"type": "linear", "rope_type": "yarn"}, ValueError, "scaling has rope_type 'yarn' and type 'linear'"),
    ({"type": "linear"}, ValueError, r"scaling of type 'linear' lacks \['factor'\]"),
    ({"type": "linear", "factor": None}, ValueError, r"scaling of type 'linear' lacks \['factor'\]"),
    ({"type": "linear", "factor": 2.0, "beta_fast": 32}, ValueError, r"keys \['beta_fast'\], which 'linear' has"),
    ({"type": "default", "factor": 2.0}, ValueError, r"has the keys \['factor'\]"),
    ({"type": "linear", "factor": 0.5}, ValueError, r"scaling\['factor'\] is 0.5; it must be finite and at least 1"),
    ({"type": "linear", "factor": "4"}, TypeError, r"scaling\['factor'\] is '4'; it must be a real number"),
    ({"type": "linear", "factor": True}, TypeError, r"scaling\['factor'\] is True"),
    ({"type": "linear", "factor": np.nan}, ValueError, r"scaling\['factor'\] is nan"),
    ({"type": "default", "rope_theta": 0}, ValueError, r"scaling\['rope_theta'\] is 0; it must be finite and positive"),
    ({"type": "default", "partial_rotary_factor": 1.5}, ValueError, r"'partial_rotary_factor'\] is 1.5; it must"),
    ({"type": "default", "partial_rotary_factor": 0.4}, ValueError, "rotary_dim is 3; "),
    ({"type": "dynamic", "factor": 2.0}, ValueError, "scaling of type 'dynamic' has neither 'original_max"),
    ({"type": "dynamic", "factor": 2.0, "max_position_embeddings": 8, "original_max_position_embeddings": 4},
     ValueError, "scaling of type 'dynamic' has different"),
    ({"type": "dynamic", "factor": 2.0, "max_position_embeddings": 8.5}, ValueError, "is 8.5; it must be a whole"),
    ({"type": "dynamic", "factor": 2.0, "max_position_embeddings": 0}, ValueError, "is 0; it must be .* at least 2"),
    ({"type": "yarn", "factor": 4.0}, ValueError, "scaling of type 'yarn' lacks"),
    ({"type": "yarn", "original_max_position_embeddings": 64}, ValueError, "scaling of type 'yarn' needs 'factor' or"),
    ({**YARN, "max_position_embeddings": 4096}, ValueError, "'yarn' has factor 4.0 and lengths whose ratio is 2.0"),
    ({**YARN, "beta_fast": 0.5}, ValueError, "scaling has beta_fast 0.5 and beta_slow 1.0"),
    ({**YARN, "mscale": 0.5}, ValueError, "has only one of 'mscale' and 'mscale_all_dim'; .* it is 1.069.*, .* 1.138"),
    ({**YARN, "mscale_all_dim": 1.0}, ValueError, "only one of 'mscale' and 'mscale_all_dim'; .* it is 1.0, .* 1.138"),
    ({**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.2}, ValueError, "has attention_factor 1.2"),
    ({**YARN, "attention_factor": 0}, ValueError, r"\['attention_factor'\] is 0; it must be finite and positive"),
    ({**YARN, "truncate": 1}, TypeError, r"scaling\['truncate'\] is 1; it must be True or False"),
    ({**YARN, "rope_theta": 1.0}, ValueError, "base is 1.0; scaling of type 'yarn' needs a base above 1"),
    ({**LONG}, ValueError, "scaling of type 'longrope' needs 'attention_factor', 'factor' or"),
    ({**LONG, "factor": 2.0, "short_factor": [1.0] * 3}, ValueError, r"scaling\['short_factor'\] has 3 numbers; .* 4"),
    ({**LONG, "factor": 2.0, "long_factor": [1.0] * 8}, ValueError, r"scaling\['long_factor'\] has 8 numbers; .* 4"),
    ({**LONG, "factor": 2.0, "long_factor": [1.0, 0.0, 1.0, 1.0]}, ValueError, r"\['long_factor'\]\[1\] is 0.0;"),
    ({**LONG, "factor": 2.0, "long_factor": 1.0}, TypeError, r"scaling\['long_factor'\] is 1.0; it must be a list"),
    ({**LONG, "factor": 2.0, "max_position_embeddings": 64}, ValueError, "'longrope' has factor 2.0 and lengths whose"),
    ({**LONG, "short_mscale": 1.0}, ValueError, "scaling has only one of 'short_mscale' and 'long_mscale'"),
    ({**LONG, "short_mscale": 1.0, "long_mscale": 1.0, "attention_factor": 1.0}, ValueError, "'attention_factor' and"),
    ({**LLAMA, "high_freq_factor": 1.0}, ValueError, "scaling has low_freq_factor 1.0 and high_freq_factor 1.0"),
]  # fmt: skip


@pytest.mark.parametrize(("scaling", "kind", "message"), SCALINGS)
def test_errors_of_scaling(scaling, kind, message):
    out = np.full(X.shape, 7, np.float32)
    with pytest.raises(kind, match=f"rotary_embedding: .*({message})"):
        rotary_embedding(X, scaling=scaling, out=out)
    assert (out == 7).all()


def test_a_dictionary_is_read_anew_when_it_changes():
    x = np.random.default_rng(0).uniform(-1, 1, (3, 8))
    scaling = {"type": "linear", "factor": 1}
    one = rotary_embedding(x, 9, scaling=scaling)
    with pytest.raises(TypeError, match="is True; it must be a real number"):
        rotary_embedding(x, 9, scaling={"type": "linear", "factor": True})  # equal to 1, which was accepted
    scaling["factor"] = 2
    two = rotary_embedding(x, 9, scaling=scaling)
    np.testing.assert_array_equal(one, rotary_embedding(x, 9))
    assert np.abs(one - two).max() > 0.1
    longrope = {**LONG, "factor": 2.0, "short_factor": [1.0] * 4}
    before = rotary_embedding(x, 9, scaling=longrope)
    longrope["short_factor"][2] = 3.0
    assert np.abs(rotary_embedding(x, 9, scaling=longrope) - before).max() > 1e-3
    longrope["short_factor"][:] = [True, 1, 1, 3]
    with pytest.raises(TypeError, match=r"short_factor'\]\[0\] is True"):
        rotary_embedding(x, 9, scaling=longrope)


def test_two_bases_or_two_widths_contradict():
    with pytest.raises(ValueError, match=r"base is 5.0 and scaling\['rope_theta'\] is 7.0"):
        rotary_embedding(X, base=5.0, scaling={"type": "default", "rope_theta": 7.0})
    with pytest.raises(ValueError, match=r"rotary_dim is 6 and scaling\['partial_rotary_factor'\] is 0.5"):
        rotary_embedding(X, rotary_dim=6, scaling={"type": "default", "partial_rotary_factor": 0.5})


def test_inputs_are_not_modified():
    scaling = {**LONG, "factor": 2.0}
    before, x = {**scaling}, np.random.default_rng(0).uniform(-1, 1, X.shape)
    kept, positions, tables = x.copy(), np.array([3, 1, 0, 5]), (T.copy(), T.copy())
    rotary_embedding(x, positions, scaling=scaling)
    rotary_embedding(x, positions, cos=tables[0], sin=tables[1], inverse=True)
    assert scaling == before
    np.testing.assert_array_equal(x, kept)
    np.testing.assert_array_equal(positions, [3, 1, 0, 5])
    for table in tables:
        np.testing.assert_array_equal(table, T)
