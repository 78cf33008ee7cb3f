"""Frequencies of the rotary position embedding, plain and as the long-context methods change them.

A pair i of rotary_dim / 2 turns by position * f_i, plain f_i = base^(-2 i / rotary_dim). Every formula is evaluated to
60 digits and kept as the sum of two float64 numbers, so that positions far out keep their digits. Sources:

    linear     f / factor: Chen et al., "Extending Context Window of Large Language Models via Positional Inter-
               polation", 2023
    ntk        another base: base * factor^(d / (d - 2)), the "NTK-aware" rule of the YaRN paper, section 3.1
    dynamic    the same with the factor that the length needs: factor * length / trained - (factor - 1); the YaRN paper,
               section 3.3, with the factor as model libraries use it
    yarn       f and f / factor mixed by wavelength: Peng et al., "YaRN", 2023, sections 3.2 and 3.4
    longrope   f divided by a list, one for short and one for long input: Ding et al., "LongRoPE", 2024
    llama3     f and f / factor mixed by wavelength: the Llama 3.1 models (Grattafiori et al., "The Llama 3 Herd", 2024)

with d = rotary_dim. The keys are those of the configurations that such models are published with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..arguments import finite, flag

if TYPE_CHECKING:
    from decimal import Decimal

Array = NDArray[Any]
Values = tuple[tuple[str, Any], ...]

NAME = "rotary_embedding"  # in errors
DEFAULT_BASE = 10000.0
_PI = "3.14159265358979323846264338327950288419716939937510582097494459230781640628620900"
_TRAINED, _REACHED = "original_max_position_embeddings", "max_position_embeddings"


class Frequencies(NamedTuple):
    """What turns the pairs: quarter turns per position as high + low, and a factor of sines and cosines."""

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
}
# kind -> keys it needs, keys it may have; those of _ALWAYS go with each.
_KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "ntk": (("factor",), ()),
    "dynamic": (("factor",), (_TRAINED, _REACHED)),
    "yarn": (
        (_TRAINED,),
        ("factor", _REACHED, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": (
        ("short_factor", "long_factor", _TRAINED),
        ("factor", _REACHED, "attention_factor", "short_mscale", "long_mscale"),
    ),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", _TRAINED), ()),
}
_ALIASES = {"su": "longrope"}
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
    """Checks a dictionary as model configurations hold it; a value of None counts as a key that is not there.

    A decoder asks with the same one for each token, where the checks would take ten times as long as the rotation: what
    was found is kept. Types belong to the key, because True is refused where the equal 1 is not.
    """
    if not isinstance(scaling, Mapping):
        raise TypeError(f"{NAME}: scaling is a {type(scaling).__name__}; it must be a dictionary, or None")
    items = tuple(
        (key, list, tuple(value), tuple(map(type, value)))
        if key in ("short_factor", "long_factor") and type(value) is list
        else (key, type(value), value, None)
        for key, value in scaling.items()
    )
    try:
        hash(items)
    except TypeError:  # an array, or something that the checks refuse
        return _checked(scaling)
    return _checked_before(items)


@lru_cache(maxsize=64)
def _checked_before(items: tuple[tuple[str, type, Any, Any], ...]) -> Scaling:
    return _checked({key: value for key, _, value, _ in items})


def _checked(scaling: Mapping[str, Any]) -> Scaling:
    kind = _kind(scaling)
    needed, optional = _KINDS[kind]
    given = {key: value for key, value in scaling.items() if value is not None}
    missing = [key for key in needed if key not in given]
    unknown = [key for key in given if key not in (*needed, *optional, *_ALWAYS)]
    if missing or unknown:
        found = f"lacks {missing}" if missing else f"has the keys {unknown}, which {kind!r} has no use for"
        raise ValueError(
            f"{NAME}: scaling of type {kind!r} {found}; it needs {list(needed)} and may have {[*optional, *_ALWAYS]}"
        )
    values = {}
    for key, value in given.items():
        if key not in ("rope_type", "type"):
            read, *least = _READERS.get(key, (finite,))
            values[key] = read(NAME, f"scaling[{key!r}]", value, *least)
    base, fraction = values.pop("rope_theta", None), values.pop("partial_rotary_factor", None)
    if fraction is not None and fraction > 1:
        raise ValueError(f"{NAME}: scaling['partial_rotary_factor'] is {fraction}; it must be at most 1")
    check = _CHECKS.get(kind)
    if check is not None:
        check(values)
    return Scaling(kind, tuple(sorted(values.items())), base, fraction)


def _differ(a: float, b: float) -> bool:
    return not math.isclose(a, b, rel_tol=1e-6)


def _check_dynamic(values: dict[str, Any]) -> None:
    trained = {values[key] for key in (_TRAINED, _REACHED) if key in values}
    if len(trained) != 1:
        found = "has neither" if not trained else "has different"
        raise ValueError(
            f"{NAME}: scaling of type 'dynamic' {found} {_TRAINED!r} and {_REACHED!r}; one of them must "
            "give the length that the model was trained with"
        )


def _check_reached(kind: str, values: dict[str, Any]) -> None:
    """Settles the factor, which the two lengths may give instead."""
    if _REACHED in values:
        ratio = values[_REACHED] / values[_TRAINED]
        if "factor" in values and _differ(ratio, values["factor"]):
            raise ValueError(
                f"{NAME}: scaling of type {kind!r} has factor {values['factor']} and lengths whose ratio is "
                f"{ratio}; leave out {_REACHED!r}, or make them agree"
            )
        values.setdefault("factor", ratio)


def _check_yarn(values: dict[str, Any]) -> None:
    _check_reached("yarn", values)
    if "factor" not in values:
        raise ValueError(f"{NAME}: scaling of type 'yarn' needs 'factor' or {_REACHED!r}")
    fast, slow = values.setdefault("beta_fast", 32.0), values.setdefault("beta_slow", 1.0)
    if fast < slow:
        raise ValueError(
            f"{NAME}: scaling has beta_fast {fast} and beta_slow {slow}; beta_fast must not be the smaller"
        )
    if ("mscale" in values) != ("mscale_all_dim" in values):
        raise ValueError(f"{NAME}: scaling has only one of 'mscale' and 'mscale_all_dim'; give both or none")

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(values["factor"]) + 1.0 if values["factor"] > 1 else 1.0

    if "mscale" in values:
        found = magnitude(values["mscale"]) / magnitude(values["mscale_all_dim"])
        if _differ(values.setdefault("attention_factor", found), found):
            raise ValueError(
                f"{NAME}: scaling has attention_factor {values['attention_factor']}, and 'mscale' and "
                f"'mscale_all_dim' give {found}; leave out one of the two"
            )
    values.setdefault("attention_factor", magnitude(1.0))


def _check_longrope(values: dict[str, Any]) -> None:
    _check_reached("longrope", values)
    if ("short_mscale" in values) != ("long_mscale" in values):
        raise ValueError(f"{NAME}: scaling has only one of 'short_mscale' and 'long_mscale'; give both or none")
    if "short_mscale" in values:
        if "attention_factor" in values:
            raise ValueError(
                f"{NAME}: scaling has 'attention_factor' and 'short_mscale', 'long_mscale'; leave out the "
                "one or the others"
            )
    elif "attention_factor" not in values:
        if "factor" not in values:
            raise ValueError(f"{NAME}: scaling of type 'longrope' needs 'attention_factor', 'factor' or {_REACHED!r}")
        growth = math.log(max(values["factor"], 1.0)) / math.log(values[_TRAINED])
        values["attention_factor"] = math.sqrt(1 + growth)


def _check_llama3(values: dict[str, Any]) -> None:
    low, high = values["low_freq_factor"], values["high_freq_factor"]
    if low >= high:
        raise ValueError(
            f"{NAME}: scaling has low_freq_factor {low} and high_freq_factor {high}; the second must be the larger"
        )


_CHECKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "dynamic": _check_dynamic,
    "yarn": _check_yarn,
    "longrope": _check_longrope,
    "llama3": _check_llama3,
}


# ---- the formulas ----


def _plain(base: Decimal, dim: int) -> list[Decimal]:
    from decimal import Decimal

    ratio, powers = base ** (Decimal(-2) / dim), [Decimal(1)]
    while len(powers) < dim // 2:
        powers.append(powers[-1] * ratio)
    return powers


def _other_base(base: Decimal, dim: int, factor: Decimal) -> list[Decimal]:
    """The base grows by factor^(d / (d - 2)), so that the last frequency shrinks by the factor. One pair has base^0."""
    from decimal import Decimal

    return _plain(base if dim == 2 else base * factor ** (Decimal(dim) / (dim - 2)), dim)


def _yarn(base: Decimal, dim: int, values: dict[str, Any]) -> list[Decimal]:
    """Pairs with more than beta_fast turns in the trained length keep f, with fewer than beta_slow get f / factor."""
    from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

    plain, factor = _plain(base, dim), Decimal(values["factor"])
    lengths = (Decimal(values[_TRAINED]) / Decimal(values[beta]) for beta in ("beta_fast", "beta_slow"))
    low, high = (dim * (length / (2 * Decimal(_PI))).ln() / (2 * base.ln()) for length in lengths)  # pairs, as numbers
    if values.get("truncate", True):
        low, high = low.to_integral_value(ROUND_FLOOR), high.to_integral_value(ROUND_CEILING)
    low, high = max(low, Decimal(0)), min(high, Decimal(dim - 1))
    if low == high:
        high += Decimal("0.001")
    ramp = (min(max((i - low) / (high - low), Decimal(0)), Decimal(1)) for i in range(dim // 2))
    return [f / factor * share + f * (1 - share) for f, share in zip(plain, ramp, strict=True)]


def _llama3(base: Decimal, dim: int, values: dict[str, Any]) -> list[Decimal]:
    """By the turns n of a pair in the trained length: n above high_freq_factor keeps f, n below low_freq_factor gets
    f / factor, between them linear in n."""
    from decimal import Decimal

    factor, trained = Decimal(values["factor"]), Decimal(values[_TRAINED])
    low, high = Decimal(values["low_freq_factor"]), Decimal(values["high_freq_factor"])
    found = []
    for f in _plain(base, dim):
        share = (trained * f / (2 * Decimal(_PI)) - low) / (high - low)
        share = min(max(share, Decimal(0)), Decimal(1))
        found.append((1 - share) * f / factor + share * f)
    return found


def _halves(frequencies: list[Decimal], attention_factor: float) -> Frequencies:
    from decimal import Decimal

    quarters = [f * 2 / Decimal(_PI) for f in frequencies]
    high = np.array([float(q) for q in quarters])
    low = np.array([float(q - Decimal(near)) for q, near in zip(quarters, high.tolist(), strict=True)])
    for array in (high, low):
        array.flags.writeable = False  # it is cached
    return Frequencies(high, low, float(high.max()), attention_factor)


@lru_cache(maxsize=256)
def _evaluated(kind: str, values: Values, base: float, dim: int, length: int) -> Frequencies:
    """length: of the call for the kinds that depend on it, cut to what matters; else 0."""
    from decimal import Context, Decimal, localcontext

    named = dict(values)
    with localcontext(Context(prec=60)):
        exact = Decimal(base)
        factor = Decimal(named.get("factor", 1.0))
        if kind == "ntk":
            found = _other_base(exact, dim, factor)
        elif kind == "dynamic":
            trained = Decimal(int(_trained(named)))
            found = _other_base(exact, dim, factor * length / trained - (factor - 1))
        elif kind == "yarn":
            found = _yarn(exact, dim, named)
        elif kind == "longrope":
            divisors = named["long_factor" if length else "short_factor"]
            found = [f / Decimal(divisor) for f, divisor in zip(_plain(exact, dim), divisors, strict=True)]
        elif kind == "llama3":
            found = _llama3(exact, dim, named)
        else:
            found = [f / factor for f in _plain(exact, dim)]
        weight = named.get("long_mscale" if length else "short_mscale", named.get("attention_factor", 1.0))
        return _halves(found, weight)


def _trained(values: dict[str, Any]) -> float:
    return float(values[_TRAINED] if _TRAINED in values else values[_REACHED])


def plain_frequencies(base: float, dim: int) -> Frequencies:
    """base^(-2 i / dim), without any scaling."""
    return _evaluated("default", (), base, dim, 0)


def depends_on_length(scaling: Any) -> bool:
    """Whether a dictionary (or None) names one of the methods whose frequencies change with the length."""
    return scaling is not None and read_scaling(scaling).kind in ("dynamic", "longrope")


def counted_length(scaling: Scaling, length: int) -> int:
    """What the frequencies take from the length: equal numbers, equal frequencies."""
    values = dict(scaling.values)
    if scaling.kind == "longrope":
        return int(length > values[_TRAINED])
    return max(length, int(_trained(values))) if scaling.kind == "dynamic" else 0


def scaled_frequencies(scaling: Scaling, base: float, dim: int, length: int) -> Frequencies:
    """Frequencies of rows whose largest position is length - 1."""
    values = dict(scaling.values)
    if scaling.kind == "yarn" and base <= 1:
        raise ValueError(f"{NAME}: base is {base}; scaling of type 'yarn' needs a base above 1")
    if scaling.kind == "longrope":
        for name in ("short_factor", "long_factor"):
            if len(values[name]) != dim // 2:
                raise ValueError(
                    f"{NAME}: scaling[{name!r}] has {len(values[name])} numbers; it needs rotary_dim / 2 = "
                    f"{dim // 2}, one per pair"
                )
    if scaling.kind == "dynamic" and length <= _trained(values):
        return plain_frequencies(base, dim)
    return _evaluated(scaling.kind, scaling.values, base, dim, counted_length(scaling, length))
