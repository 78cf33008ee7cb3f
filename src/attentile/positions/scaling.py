"""Frequencies of the rotary position embedding, plain and as the long-context methods change them.

Pair i of rotary_dim / 2 is rotated by position * f_i, plain f_i = base^(-2 i / rotary_dim). Every formula is evaluated
to 60 digits and kept as the sum of two float64 numbers, so that positions far out keep their digits. Sources:

    linear     f / factor: Chen et al., "Extending Context Window of Large Language Models via Positional Inter-
               polation", 2023
    ntk        another base: base * factor^(d / (d - 2)), the "NTK-aware" rule of the YaRN paper, section 3.1
    dynamic    the same with the factor that the length needs: factor * length / trained - (factor - 1); the YaRN paper,
               section 3.3, with the factor as model libraries use it
    yarn       f and f / factor mixed by wavelength: Peng et al., "YaRN", 2023, sections 3.2 and 3.4
    longrope   f divided by a list, one for short and one for long input: Ding et al., "LongRoPE", 2024
    llama3     f and f / factor mixed by wavelength: the Llama 3.1 models (Grattafiori et al., "The Llama 3 Herd", 2024)

with d = rotary_dim. The keys are those of the configurations that such models are published with. Some of these keys do
not change the frequencies: "finetuned" tells how a YaRN model was made, and "mrope_section" gives each position of an
image three numbers, which are equal in text, where the rotation is the plain one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..arguments import finite, flag, integer

if TYPE_CHECKING:
    from decimal import Decimal

Array = NDArray[Any]
Values = tuple[tuple[str, Any], ...]

NAME = "rotary_embedding"  # in errors
DEFAULT_BASE = 10000.0
_PI = "3.14159265358979323846264338327950288419716939937510582097494459230781640628620900"
_SAME = 1e-6  # relative difference of numbers that were rounded for a configuration file
_TRAINED, _REACHED = "original_max_position_embeddings", "max_position_embeddings"


class Frequencies(NamedTuple):
    """What rotates the pairs: quarter turns per position as high + low, and a factor of sines and cosines."""

    high: Array
    low: Array
    largest: float
    attention_factor: float


class Scaling(NamedTuple):
    """A checked dictionary. base and rotary_fraction are None unless it has them."""

    kind: str
    values: Values
    base: float | None
    rotary_fraction: float | None


_UNSCALED = Scaling("default", (), None, None)


# ---- checks of the dictionary ----


def _length(function: str, name: str, value: Any, least: float) -> float:
    found = finite(function, name, value, least)
    if found != int(found):
        raise ValueError(f"{function}: {name} is {value!r}; it must be a whole number of tokens")
    return found


def _list(function: str, name: str, value: Any) -> tuple[float, ...]:
    if not isinstance(value, (list, tuple, np.ndarray)):
        raise TypeError(f"{function}: {name} is {value!r}; it must be a list of numbers, one per pair")
    return tuple(finite(function, f"{name}[{i}]", x) for i, x in enumerate(value))


def _section(function: str, name: str, value: Any) -> None:
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{function}: {name} is {value!r}; it must be a list of numbers of pairs")
    for i, x in enumerate(value):
        integer(function, f"{name}[{i}]", x, 0, wanted="a number of pairs")


# How a value is read: the function, and what it must at least be. A key that is not here has a positive number.
_READERS: dict[str, tuple[Callable[..., Any], *tuple[float, ...]]] = {
    "factor": (finite, 1.0),
    "mscale": (finite, 0.0),
    "mscale_all_dim": (finite, 0.0),
    _TRAINED: (_length, 2.0),
    _REACHED: (_length, 2.0),
    "short_factor": (_list,),
    "long_factor": (_list,),
    "truncate": (flag,),
    "finetuned": (flag,),
    "mrope_section": (_section,),
    "mrope_interleaved": (flag,),
}


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(f"{NAME}: scaling {otherwise}")


def _check_dynamic(values: dict[str, Any]) -> None:
    trained = {values[key] for key in (_TRAINED, _REACHED) if key in values}
    _require(
        len(trained) == 1,
        f"of type 'dynamic' has {'different' if trained else 'neither'} {_TRAINED!r} and {_REACHED!r}; one of them "
        "must give the length that the model was trained with",
    )
    values.setdefault(_TRAINED, trained.pop())


def _check_reached(kind: str, values: dict[str, Any]) -> None:
    """Settles the factor, which the two lengths may give instead."""
    if _REACHED in values:
        ratio = values[_REACHED] / values[_TRAINED]
        factor = values.setdefault("factor", ratio)
        _require(
            math.isclose(ratio, factor, rel_tol=_SAME),
            f"of type {kind!r} has factor {factor} and lengths whose ratio is {ratio}; leave out {_REACHED!r}, or make "
            "them agree",
        )


def _check_yarn(values: dict[str, Any]) -> None:
    _check_reached("yarn", values)
    _require("factor" in values, f"of type 'yarn' needs 'factor' or {_REACHED!r}")
    fast, slow = values.setdefault("beta_fast", 32.0), values.setdefault("beta_slow", 1.0)
    _require(fast >= slow, f"has beta_fast {fast} and beta_slow {slow}; beta_fast must not be the smaller")
    weights = [values[key] for key in ("mscale", "mscale_all_dim") if key in values]
    both = len(weights) == 2

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(values["factor"]) + 1.0 if values["factor"] > 1 else 1.0

    ratio = magnitude(values.get("mscale", 1.0)) / magnitude(values.get("mscale_all_dim", 0.0))
    found = ratio if both else magnitude(1.0)
    # Of a single one, libraries take the default of the other (1 or 0), or take neither into account.
    _require(
        both or "attention_factor" in values or math.isclose(ratio, found, rel_tol=_SAME),
        "has only one of 'mscale' and 'mscale_all_dim'; give both or none, or 'attention_factor': for libraries that "
        f"take the default of the other it is {ratio}, for those that then ignore both {found}",
    )
    given = values.setdefault("attention_factor", found)
    _require(
        math.isclose(given, found, rel_tol=_SAME) or not both,
        f"has attention_factor {given}, and 'mscale' and 'mscale_all_dim' give {found}; leave out one of the two",
    )


def _check_longrope(values: dict[str, Any]) -> None:
    _check_reached("longrope", values)
    both = "short_mscale" in values
    _require(both == ("long_mscale" in values), "has only one of 'short_mscale' and 'long_mscale'; give both or none")
    if "attention_factor" in values:
        _require(not both, "has 'attention_factor' and 'short_mscale', 'long_mscale'; leave out the one or the others")
    elif not both:
        _require("factor" in values, f"of type 'longrope' needs 'attention_factor', 'factor' or {_REACHED!r}")
        growth = math.log(max(values["factor"], 1.0)) / math.log(values[_TRAINED])
        values["attention_factor"] = math.sqrt(1 + growth)


def _check_llama3(values: dict[str, Any]) -> None:
    low, high = values["low_freq_factor"], values["high_freq_factor"]
    _require(low < high, f"has low_freq_factor {low} and high_freq_factor {high}; the second must be the larger")


# kind -> keys it needs, keys it may have (those of _ALWAYS go with each), what checks and completes the values.
_KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...], Callable[[dict[str, Any]], None] | None]] = {
    "default": ((), ("mrope_section", "mrope_interleaved"), None),
    "linear": (("factor",), (), None),
    "ntk": (("factor",), (), None),
    "dynamic": (("factor",), (_TRAINED, _REACHED), _check_dynamic),
    "yarn": (
        (_TRAINED,),
        (
            "factor",
            _REACHED,
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
            "finetuned",
        ),
        _check_yarn,
    ),
    "longrope": (
        ("short_factor", "long_factor", _TRAINED),
        ("factor", _REACHED, "attention_factor", "short_mscale", "long_mscale"),
        _check_longrope,
    ),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", _TRAINED), (), _check_llama3),
}
_ALIASES = {"su": "longrope", "mrope": "default"}
_WITHOUT_EFFECT = ("finetuned", "mrope_section", "mrope_interleaved")
_ALWAYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


def _kind(scaling: Mapping[str, Any]) -> str:
    names = [scaling[key] for key in ("rope_type", "type") if scaling.get(key) is not None]
    known = ", ".join([*_KINDS, *_ALIASES])
    if not names:
        raise ValueError(
            f"{NAME}: scaling has neither 'rope_type' nor 'type' (its keys: {sorted(map(str, scaling))}); "
            f"one of them must name the method, {known}"
        )
    kinds = {_ALIASES.get(str(name), str(name)) for name in names}
    if len(kinds) > 1:
        raise ValueError(f"{NAME}: scaling has rope_type {names[0]!r} and type {names[1]!r}; leave out one of the two")
    kind = kinds.pop()
    if kind not in _KINDS:
        raise ValueError(f"{NAME}: scaling has type {names[0]!r}; it must be one of {known}")
    return kind


def read_scaling(scaling: Any) -> Scaling:
    """Checks a dictionary as model configurations hold it, or None; a value of None counts as a key that is not there.

    A decoder asks with the same one for each token, where the checks would take ten times as long as the rotation: what
    was found is kept. Types belong to the key, because True is refused where the equal 1 is not.
    """
    if scaling is None:
        return _UNSCALED
    if not isinstance(scaling, Mapping):
        raise TypeError(f"{NAME}: scaling is a {type(scaling).__name__}; it must be a dictionary, or None")
    items = tuple(
        (key, list, tuple(value), tuple(map(type, value)))
        if key in ("short_factor", "long_factor", "mrope_section") and type(value) is list
        else (key, type(value), value, None)
        for key, value in scaling.items()
    )
    try:
        hash(items)
    except TypeError:  # an array, or something that the checks refuse
        return _checked.__wrapped__(items)
    return _checked(items)


@lru_cache(maxsize=64)
def _checked(items: tuple[tuple[str, type, Any, Any], ...]) -> Scaling:
    scaling = {key: value for key, _, value, _ in items}
    kind = _kind(scaling)
    needed, optional, check = _KINDS[kind]
    given = {key: value for key, value in scaling.items() if value is not None}
    if kind == "longrope" and _TRAINED not in given and {"factor", _REACHED} <= given.keys():
        reached, factor = (finite(NAME, f"scaling[{key!r}]", given[key]) for key in (_REACHED, "factor"))
        given[_TRAINED] = reached / factor
    missing = [key for key in needed if key not in given]
    unknown = [key for key in given if key not in (*needed, *optional, *_ALWAYS)]
    if missing or unknown:
        hint = " (models have it at the top level of their configuration)" if _TRAINED in missing else ""
        found = f"lacks {missing}{hint}" if missing else f"has the keys {unknown}, which {kind!r} has no use for"
        raise ValueError(
            f"{NAME}: scaling of type {kind!r} {found}; it needs {list(needed)} and may have {[*optional, *_ALWAYS]}"
        )
    values = {}
    for key, value in given.items():
        if key in ("rope_type", "type"):
            continue
        read, *least = _READERS.get(key, (finite,))
        found = read(NAME, f"scaling[{key!r}]", value, *least)
        if key not in _WITHOUT_EFFECT:
            values[key] = found
    base, fraction = values.pop("rope_theta", None), values.pop("partial_rotary_factor", None)
    if fraction is not None and fraction > 1:
        raise ValueError(f"{NAME}: scaling['partial_rotary_factor'] is {fraction}; it must be at most 1")
    if check is not None:
        check(values)
    return Scaling(kind, tuple(sorted(values.items())), base, fraction)


# ---- the formulas ----


def _mixed(plain: list[Decimal], factor: Decimal, marks: list[Decimal], kept: Any, scaled: Any) -> list[Decimal]:
    """f where the mark of its pair is `kept` or before that, f / factor from `scaled` on, linear between them."""
    shares = (min(max((mark - kept) / (scaled - kept), 0), 1) for mark in marks)
    return [f / factor * share + f * (1 - share) for f, share in zip(plain, shares, strict=True)]


def _yarn_range(base: Decimal, dim: int, turns: Decimal, values: dict[str, Any]) -> tuple[Decimal, Decimal]:
    """The pairs, as numbers, that turn beta_fast and beta_slow times in the trained length, pair 0 `turns` times."""
    from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

    low, high = (dim * (turns / values[beta]).ln() / (2 * base.ln()) for beta in ("beta_fast", "beta_slow"))
    if values.get("truncate", True):
        low, high = low.to_integral_value(ROUND_FLOOR), high.to_integral_value(ROUND_CEILING)
    low, high = max(low, Decimal(0)), min(high, Decimal(dim - 1))
    return low, high if low != high else high + Decimal("0.001")


@lru_cache(maxsize=256)
def _evaluated(kind: str, values: Values, base: float, dim: int, length: int) -> Frequencies:
    """length: that of `counted_length`."""
    from decimal import Context, Decimal, localcontext  # here, as most programs never come by

    with localcontext(Context(prec=60)):
        named: dict[str, Any] = {k: [*map(Decimal, v)] if isinstance(v, tuple) else Decimal(v) for k, v in values}
        exact, pi = Decimal(base), Decimal(_PI)
        factor = named.get("factor", Decimal(1))
        if kind == "dynamic":
            factor = factor * length / named[_TRAINED] - (factor - 1)
        if kind in ("ntk", "dynamic") and dim > 2:  # the last frequency shrinks by the factor; a single pair has base^0
            exact *= factor ** (Decimal(dim) / (dim - 2))
        ratio = exact ** (Decimal(-2) / dim)
        found = [ratio**i for i in range(dim // 2)]
        if kind == "linear":
            found = [f / factor for f in found]
        elif kind == "longrope":
            divisors = named["long_factor" if length else "short_factor"]
            found = [f / divisor for f, divisor in zip(found, divisors, strict=True)]
        elif kind == "yarn":
            pairs = [Decimal(i) for i in range(dim // 2)]
            found = _mixed(found, factor, pairs, *_yarn_range(exact, dim, named[_TRAINED] / (2 * pi), named))
        elif kind == "llama3":
            turns = [named[_TRAINED] / (2 * pi) * f for f in found]  # in the trained length
            found = _mixed(found, factor, turns, named["high_freq_factor"], named["low_freq_factor"])
        quarters = [f * 2 / pi for f in found]
        high = np.array(quarters, float)
        low = np.array([q - Decimal(near) for q, near in zip(quarters, high.tolist(), strict=True)], float)
    for array in (high, low):
        array.flags.writeable = False  # it is cached
    weight = named.get("long_mscale" if length else "short_mscale", named.get("attention_factor", 1.0))
    return Frequencies(high, low, float(high.max()), float(weight))


def depends_on_length(scaling: Any) -> bool:
    """Whether a dictionary (or None) names one of the methods whose frequencies change with the length."""
    return read_scaling(scaling).kind in ("dynamic", "longrope")


def counted_length(scaling: Scaling, length: int) -> int:
    """What the frequencies take from the length: equal numbers, equal frequencies."""
    if scaling.kind not in ("dynamic", "longrope"):
        return 0
    trained = int(dict(scaling.values)[_TRAINED])
    return max(length, trained) if scaling.kind == "dynamic" else int(length > trained)


def frequencies(scaling: Scaling, base: float, dim: int, length: int) -> Frequencies:
    """Frequencies of rows whose largest position is length - 1."""
    if scaling is _UNSCALED:  # most calls
        return _evaluated("default", (), base, dim, 0)
    if scaling.kind == "yarn" and base <= 1:
        raise ValueError(f"{NAME}: base is {base}; scaling of type 'yarn' needs a base above 1")
    for name, value in scaling.values:
        if name in ("short_factor", "long_factor") and len(value) != dim // 2:
            raise ValueError(
                f"{NAME}: scaling[{name!r}] has {len(value)} numbers; it needs rotary_dim / 2 = {dim // 2}, "
                "one per pair"
            )
    return _evaluated(scaling.kind, scaling.values, base, dim, counted_length(scaling, length))
