"""MultiHeadAttention: a layer's projections around attention(), from arrays or from a checkpoint's own names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..arguments import as_array, check_out, check_scale, positive_index
from ..attention import OPTIONS, attention
from ..cache import KVCache
from ..outputs import AttentionResult
from ..positions.items import copied_options, kept_options
from ..positions.rotary import rotary_embedding
from ..scores import SCORE_OPTIONS
from ..storage import promoted, rounded
from .backward import LayerCall
from .heads import Heads
from .norms import Norms
from .projections import NAME, Projections, matrix, times, vector, width_per_head

Array = NDArray[Any]

# attention()'s keywords; a misspelt one must be refused before a cache is changed.
_OPTIONS = OPTIONS.keys() - {"out"}


class _Plan(NamedTuple):
    """What one call works on, after its checks."""

    x: Array  # (..., L, d_in)
    context: tuple[Array, ...]  # none, rows to project, or keys and values
    compute: np.dtype[Any]  # dtype of the arithmetic
    dtype: np.dtype[Any]  # dtype of the result
    lead: tuple[int, ...]  # batch axes of the result
    added: int  # axes in front: 1 if x was given without the batch axis that a cache needs


class MultiHeadAttention:
    """Multi-head attention with given weights: project by x @ W, attend per head, concatenate, times w_o.

    Formula: Vaswani et al., "Attention Is All You Need", 2017, section 3.2.2; grouped queries: Ainslie et al., "GQA",
    2023.

    Parameters
    ----------
    w_q : array_like, shape (d_in, num_heads * head_dim)
        Head h uses the columns h * head_dim .. (h + 1) * head_dim - 1; num_heads * head_dim need not equal d_in. With
        w_k = w_v = None it is the fused weight (d_in, q + k + v), its columns as `layout` says.
    w_k, w_v : array_like, shapes (d_context, num_kv_heads * head_dim or value_dim), or None
        Keys and values; value_dim is free. If d_context differs from d_in, every call needs ``context``.
    w_o : array_like, shape (num_heads * value_dim, d_out)
        Applied to the heads' results side by side.
    num_heads, num_kv_heads : int
        Query heads; key heads, shared as in `attention`, by default num_heads.
    b_q, b_k, b_v, b_o : array_like, optional
        Biases, as long as their weight has columns; with a fused weight b_q is the fused bias.
    scale : float, optional
        As in `attention`, unless the call gives one that is not None. Default: head_dim ** -0.5.
    sinks : array_like of float, shape (num_heads,), optional
        As in `attention`, unless the call gives some.
    rotary : dict, optional
        Keyword arguments of `rotary_embedding` ({} for its defaults), which then rotates queries and keys.
    norm : dict, optional
        Normalise queries and keys before their product. ``kind`` is "rms" (Qwen3), "rms_plus_one", whose factor is
        1 + weight (Gemma 3), or "layer", LayerNorm (Persimmon); ``eps`` is added to the mean of squares. Optional:
        ``after_rotary=True`` normalises rotated queries and keys (HunYuan), ``values=True`` the values too, without a
        weight (Gemma 4).
    q_norm, k_norm : array_like, optional
        Weights of `norm`, both or none. Shape (head_dim,) is shared by all heads, (num_heads, head_dim) has one row for
        each, and with (num_heads * head_dim,) all heads together are normalised as one vector (OLMo 2); of keys,
        num_kv_heads.
    b_q_norm, b_k_norm : array_like, optional
        Biases of a LayerNorm, as q_norm and k_norm.
    layout : {"side_by_side", "per_head", "codegen"}, optional
        Order of the columns of the fused weight: all queries, all keys, all values (the default); for each key head in
        turn its queries, its key and its value (GPT-NeoX, BLOOM, Falcon); or four times the queries, values and keys of
        a quarter of the heads (CodeGen).

    Raises
    ------
    ValueError, TypeError
        Shapes that do not fit together, unsupported dtypes, unknown options: at construction, or before a call's work.

    Notes
    -----
    Weights are kept as they are: views and read-only arrays are not copied, nothing is transposed in memory. float16
    and bfloat16 weights are converted to float32 in every call; convert them once if the memory allows it. The
    projections are NumPy's matrix products, so their last bits may depend on the number of rows of a call, those of the
    attention between them do not. A layer has the attributes num_heads, num_kv_heads, head_dim, value_dim, d_in,
    d_context, d_out (int), scale, rotary and norm (copies of what was given, or None).

    Examples
    --------
    >>> import numpy as np
    >>> from attentile import KVCache, MultiHeadAttention
    >>> rng = np.random.default_rng(0)
    >>> weights = {f"{p}_proj.weight": rng.standard_normal((n, 32)) for p, n in zip("qkvo", (32, 16, 16, 32))}
    >>> layer = MultiHeadAttention.from_arrays(weights, num_heads=4, num_kv_heads=2, rotary={})
    >>> layer
    MultiHeadAttention(d_in=32, d_out=32, num_heads=4, num_kv_heads=2, head_dim=8, rotary={})
    >>> x = rng.standard_normal((1, 6, 32))
    >>> full = layer(x, causal=True)
    >>> cache = KVCache(1, 2, 8, dtype="float64")
    >>> prompt, step = layer(x[:, :5], cache=cache), layer(x[:, 5:], cache=cache)
    >>> np.allclose(full, np.concatenate([prompt, step], axis=1))
    True
    """

    def __init__(
        self,
        w_q: ArrayLike,
        w_k: ArrayLike | None,
        w_v: ArrayLike | None,
        w_o: ArrayLike,
        *,
        num_heads: int,
        num_kv_heads: int | None = None,
        b_q: ArrayLike | None = None,
        b_k: ArrayLike | None = None,
        b_v: ArrayLike | None = None,
        b_o: ArrayLike | None = None,
        scale: float | None = None,
        sinks: ArrayLike | None = None,
        rotary: Mapping[str, Any] | None = None,
        norm: Mapping[str, Any] | None = None,
        q_norm: ArrayLike | None = None,
        k_norm: ArrayLike | None = None,
        b_q_norm: ArrayLike | None = None,
        b_k_norm: ArrayLike | None = None,
        layout: str | None = None,
    ) -> None:
        self.num_heads = positive_index(NAME, "num_heads", num_heads)
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.num_kv_heads = positive_index(NAME, "num_kv_heads", kv_heads)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{NAME}: num_heads is {self.num_heads} and num_kv_heads is {self.num_kv_heads}; "
                "num_heads must be a multiple of it"
            )
        self.scale = check_scale(NAME, scale)
        self._w_o = matrix("w_o", w_o)
        self._b_o = vector("b_o", b_o, self._w_o.shape[1])
        self.value_dim = width_per_head("w_o", self._w_o.shape[0], "rows", self.num_heads)
        project = Projections(
            (w_q, w_k, w_v), (b_q, b_k, b_v), self.num_heads, self.num_kv_heads, self.value_dim, layout
        )
        self.head_dim = project.head_dim
        self.d_in = project.d_in
        self.d_context = project.d_context
        self.d_out = self._w_o.shape[1]
        rotates = kept_options(NAME, rotary, tables=False)  # like the weights, they are not copied
        if rotates is not None:  # its own checks, with heads of this width
            rotary_embedding(np.empty((0, self.head_dim), np.float32), **rotates)
        shapes = {"q": (self.num_heads, self.head_dim), "k": (self.num_kv_heads, self.head_dim)}
        shapes["v"] = self.num_kv_heads, self.value_dim
        given = {"q": (q_norm, b_q_norm), "k": (k_norm, b_k_norm)}
        norms = Norms(norm, given, shapes, rotates=rotates is not None)
        self._heads = Heads(project, norms, rotates)
        # What the layer has and a call may override; None in a call means the layer's own.
        logits = vector("sinks", sinks, self.num_heads, "query head")
        self._defaults = {n: value for n, value in (("scale", self.scale), ("sinks", logits)) if value is not None}
        if logits is not None:  # apart from the weights, because it does not count for the dtype of a call
            promoted(NAME, logits)
        arrays = [*project.arrays, *norms.arrays, self._w_o, *([] if self._b_o is None else [self._b_o])]
        promoted(NAME, *arrays)
        # An empty array that stands for all weights when a call settles its dtype.
        self._like = np.empty(0, np.result_type(*{array.dtype for array in arrays}))

    @classmethod
    def from_arrays(
        cls,
        arrays: Mapping[str, ArrayLike],
        prefix: str = "",
        *,
        num_heads: int,
        num_kv_heads: int | None = None,
        scale: float | None = None,
        rotary: Mapping[str, Any] | None = None,
        norm: Mapping[str, Any] | None = None,
        layout: str | None = None,
    ) -> MultiHeadAttention:
        """The attention layer whose arrays lie below `prefix` in a checkpoint, found by their usual names.

        Parameters
        ----------
        arrays : mapping of str to array_like
            A state dict, an npz file, the tensors of a safetensors or (dequantised) GGUF file. Only the arrays that
            are used are read, and they are not copied.
        prefix : str
            Where the layer is, with or without the last dot: "model.layers.0.self_attn", "blk.0". A shorter prefix
            will do as long as only one attention layer lies below it.
        num_heads, num_kv_heads, scale, rotary, norm, layout
            As in the constructor. No array tells the numbers of heads, the rotation, and the kind and eps of a norm of
            queries and keys. Default of scale: what the names tell, 1 for T5 and GPT-Neo; of layout: likewise.

        Returns
        -------
        MultiHeadAttention
            Its norms of queries and keys, and its sinks, are those of the arrays.

        Raises
        ------
        ValueError
            No known set of names is complete, or more than one is; the names have two readings with other results, and
            scale or layout must decide; there is a norm of queries and keys, and norm is missing; or the attention has
            a further array, which may change the result (a norm of its input, a bias of the scores, a gate, an
            adapter). The message lists what was found.
        TypeError
            Arrays that are not floating, as those of quantised checkpoints.

        Notes
        -----
        The error for unknown names lists those that are known: of PyTorch's nn.MultiheadAttention, of some hundred
        models of the transformers library, of ViT in timm, and of GGUF files. GGUF files and the original files of the
        Llama family need ``"interleaved": True`` in rotary. T5 and MPNet need their `t5_bias` in the call. The
        documentation has a table of models and their arguments, and lists the models whose arrays do not tell what
        they differ in.

        Examples
        --------
        >>> import numpy as np
        >>> from attentile import MultiHeadAttention
        >>> gpt2 = {"h.0.attn.c_attn.weight": np.ones((8, 24)), "h.0.attn.c_attn.bias": np.zeros(24)}
        >>> gpt2 |= {"h.0.attn.c_proj.weight": np.ones((8, 8)), "h.0.attn.c_proj.bias": np.zeros(8)}
        >>> MultiHeadAttention.from_arrays(gpt2, "h.0", num_heads=2)(np.ones((3, 8)), causal=True).shape
        (3, 8)
        """
        from .checkpoints import find_attention  # here, because most programs never come by

        given = {"scale": scale, "norm": norm, "layout": layout}
        heads = positive_index(NAME, "num_heads", num_heads)
        kv_heads = heads if num_kv_heads is None else positive_index(NAME, "num_kv_heads", num_kv_heads)
        found = find_attention(arrays, prefix, (heads, kv_heads), given)
        return cls(**found, num_heads=num_heads, num_kv_heads=num_kv_heads, rotary=rotary)

    @property
    def rotary(self) -> dict[str, Any] | None:
        """The options of the rotation, a copy with read-only tables, or None."""
        return None if self._heads.rotary is None else copied_options(self._heads.rotary)

    @property
    def norm(self) -> dict[str, Any] | None:
        """The options of the norms of queries and keys, a copy with defaults filled in, or None."""
        scheme = self._heads.norms.scheme
        return None if scheme is None else asdict(scheme)

    def __repr__(self) -> str:
        same = {"d_context": self.d_in, "num_kv_heads": self.num_heads, "value_dim": self.head_dim}
        same |= dict.fromkeys(("scale", "rotary", "norm"))
        names = ("d_in", "d_context", "d_out", "num_heads", "num_kv_heads", "head_dim", "value_dim", *list(same)[3:])
        parts = {name: getattr(self, name) for name in names}
        return f"{NAME}({', '.join(f'{name}={part}' for name, part in parts.items() if same.get(name, '') != part)})"

    def __call__(
        self,
        x: ArrayLike,
        context: ArrayLike | tuple[ArrayLike, ArrayLike] | None = None,
        *,
        positions: ArrayLike | None = None,
        cache: KVCache | None = None,
        lengths: ArrayLike | None = None,
        out: Array | None = None,
        **options: Any,
    ) -> Array | AttentionResult:
        """The layer's output for x; every other option of `attention` may be given as well.

        Parameters
        ----------
        x : array_like, shape (..., L, d_in)
            One row per token.
        context : array_like, shape (..., S, d_context), optional
            Cross attention: keys and values come from it, not from x. A tuple (k, v) as `keys_values` returns it saves
            their projection when many calls share one context.
        positions : int or array_like of int, shape (L,) or (..., L), optional
            For rotary only (the masks count rows, see `q_start`): the position of row 0, or of each row. Default: 0,
            with a cache the length of the item. Of dynamic and longrope scaling each batch item has the frequencies
            of its own largest position.
        cache : KVCache, optional
            The keys and values of x are appended to it, and its default mask holds: a row sees all before it and
            itself. x is then (batch, L, d_in), or (L, d_in) for a cache of one item. A cache with a `rotary` of its own
            rotates queries and keys itself; the layer's must be the same or None.
        lengths : array_like of int, shape (batch,), optional
            With a cache: the valid rows of x in each item, left-aligned. Output rows behind them mean nothing.
        out : ndarray, shape (..., L, d_out), optional
            Written and returned; any strides.
        **options
            As in `attention`: mask, bias, causal, window, key_lengths, return_weights, num_threads, ... Without a cache
            nothing is causal by default.

        Returns
        -------
        ndarray, shape (..., L, d_out), or AttentionResult(out, lse, weights) with return_lse or return_weights
            dtype: that of x, context and the weights by the rules of `attention`. With a cache the projections are in
            the arithmetic of the weights and the attention in that of the cache, whatever the dtype of x is.

        Raises
        ------
        ValueError, TypeError
            As `attention`, and for arguments that do not go together. After every error, whatever its kind, a cache is
            as it was before the call; only an interrupt from outside may come so late that the call is complete.
        IndexError
            A row at a position for which the tables of `rotary` have no row.
        """
        rows, source = self._read(x, context, positions, options, _OPTIONS)
        if cache is not None:
            self._heads.check_cache(cache, rows, source, positions)
        elif lengths is not None:
            raise ValueError(f"{NAME}: lengths go with a cache; without one give key_lengths")
        plan = self._plan(rows, source, cache is not None)
        if out is not None:
            check_out(NAME, out, (*plan.lead, *plan.x.shape[-2:-1], self.d_out)[plan.added :], plan.dtype)
        heads = self._heads
        q, k, v = parts = self._projected(plan)
        if cache is not None:
            return cache.held.attempt(
                NAME, lambda: self._finish(heads.attend_cached(parts, cache, positions, lengths, options), plan, out)
            )
        if heads.rotary is not None:
            q, k = heads.rotated("q", q, positions), heads.rotated("k", k, positions)
        if q.shape[-2] != 1:  # the heads of a row side by side, as w_o takes them; of a single row they are so anyway
            joined = np.empty((*plan.lead, q.shape[-2], self.num_heads, self.value_dim), plan.compute)
            options["out"] = joined.swapaxes(-2, -3)
        return self._finish(attention(q, k, v, **options), plan, out)

    def vjp(
        self,
        x: ArrayLike,
        context: ArrayLike | tuple[ArrayLike, ArrayLike] | None = None,
        *,
        positions: ArrayLike | None = None,
        **options: Any,
    ) -> tuple[Array, Callable[[ArrayLike], dict[str, Any]]]:
        """The layer's output for x, and the function that takes gradients back through it.

        Parameters
        ----------
        x, context, positions
            As in a call of the layer. Like the weights, they are kept, not copied: do not change them before the last
            call of vjp.
        **options
            As in `attention_vjp`: mask, bias, causal, window, key_lengths, num_threads, ...

        Returns
        -------
        out : ndarray, shape (..., L, d_out)
            What a call of the layer returns, bit for bit.
        vjp : callable
            ``vjp(dout)`` gives a dict with the gradients of x, of context if there is one (a pair if it was), of the
            layer's arrays by the names of the constructor's arguments, those of sinks too, and of a bias. Each has the
            shape and dtype of its argument.

        Raises
        ------
        ValueError, TypeError, IndexError
            As a call of the layer, and `attention_vjp`.

        Notes
        -----
        `from_arrays` gives a weight that a checkpoint holds as (columns, rows) to the constructor transposed: so is its
        gradient. A step of training may change the weights in place: the layer has not copied those in float32 and
        float64 that it was given as arrays.

        Examples
        --------
        >>> import numpy as np
        >>> from attentile import MultiHeadAttention
        >>> layer = MultiHeadAttention(np.eye(4), np.eye(4), np.eye(4), np.eye(4), num_heads=2)
        >>> out, vjp = layer.vjp(np.ones((3, 4)), causal=True)
        >>> sorted(vjp(np.ones((3, 4))))
        ['w_k', 'w_o', 'w_q', 'w_v', 'x']
        """
        rows, source = self._read(x, context, positions, options, SCORE_OPTIONS.keys())
        plan = self._plan(rows, source, cached=False)
        call = LayerCall(self._heads, (self._w_o, self._b_o), plan.x, plan.context, plan.compute)
        return rounded(call.forward(positions, options), plan.dtype), call.backward

    def keys_values(self, context: ArrayLike) -> tuple[Array, Array]:
        """Keys and values of a context, for many calls that share it; not rotated, keys normalised if the layer does.

        Parameters
        ----------
        context : array_like, shape (..., S, d_context)

        Returns
        -------
        k, v : ndarray, shapes (..., num_kv_heads, S, head_dim) and (..., num_kv_heads, S, value_dim)

        Examples
        --------
        >>> import numpy as np
        >>> from attentile import MultiHeadAttention
        >>> layer = MultiHeadAttention(np.eye(4), np.ones((6, 4)), np.ones((6, 4)), np.eye(4), num_heads=2)
        >>> once = layer.keys_values(np.ones((3, 6)))
        >>> layer(np.ones((1, 4)), context=once)
        array([[6., 6., 6., 6.]])
        """
        given = _rows("context", context, self.d_context)
        compute, dtype = promoted(NAME, given, self._like)
        k, v = self._heads.projected(given, "kv", compute)
        return rounded(k, dtype), rounded(v, dtype)

    def _read(
        self, x: Any, context: Any, positions: Any, options: dict[str, Any], known: Set[str]
    ) -> tuple[Array, tuple[Array, ...]]:
        """The checked x and context, after every check that needs no cache; options get the layer's own."""
        if unknown := sorted(options.keys() - known):
            raise TypeError(f"{NAME}: unknown option {unknown[0]!r}; known are {', '.join(sorted(known))}")
        rows, source = _rows("x", x, self.d_in), self._source(context)
        if self._heads.rotary is not None and source:
            raise ValueError(f"{NAME}: context and rotary do not go together: the rows of context have no position")
        if self._heads.rotary is None and positions is not None:
            raise ValueError(
                f"{NAME}: positions are for a layer with rotary and this one has none (q_start places the masks)"
            )
        for name, value in self._defaults.items():
            if options.get(name) is None:
                options[name] = value
        return rows, source

    def _source(self, context: Any) -> tuple[Array, ...]:
        """The checked context: none, rows to project, or keys and values that are projected already."""
        if context is None:
            if self.d_context != self.d_in:
                raise ValueError(
                    f"{NAME}: context is missing; w_k and w_v project rows of width {self.d_context}, "
                    f"x has width {self.d_in}"
                )
            return ()
        if not isinstance(context, tuple):
            return (_rows("context", context, self.d_context),)
        if len(context) != 2:
            raise ValueError(f"{NAME}: context is a tuple of {len(context)}; it must be (k, v) from keys_values")
        k, v = (as_array(NAME, f"{name} of context", array) for name, array in zip("kv", context, strict=True))
        for name, array, width in (("k", k, self.head_dim), ("v", v, self.value_dim)):
            if array.ndim < 3 or (array.shape[-3], array.shape[-1]) != (self.num_kv_heads, width):
                wanted = f"(..., {self.num_kv_heads}, S, {width})"
                raise ValueError(f"{NAME}: {name} of context has shape {array.shape}; it must be {wanted}")
        return k, v

    def _plan(self, x: Array, context: tuple[Array, ...], cached: bool) -> _Plan:
        """Dtypes and batch axes."""
        added = cached and x.ndim == 2  # a batch axis, which caches have
        x = x[None] if added else x
        own = 3 if len(context) == 2 else 2  # axes that are not batch axes
        try:
            lead = np.broadcast_shapes(x.shape[:-2], *(array.shape[:-own] for array in context))
        except ValueError:
            shapes = " and ".join(str(array.shape) for array in (x, *context))
            raise ValueError(f"{NAME}: the batch axes of x and context do not broadcast ({shapes})") from None
        compute, dtype = promoted(NAME, x, *context, self._like)
        if cached:  # the token is converted, and not every weight at every token
            compute = promoted(NAME, self._like)[0]
        return _Plan(x, context, compute, dtype, lead, int(added))

    def _projected(self, plan: _Plan) -> list[Array]:
        """Queries (..., num_heads, L, head_dim), keys and values (..., num_kv_heads, S, width), not yet rotated."""
        projected = self._heads.projected
        if not plan.context:
            return projected(plan.x, "qkv", plan.compute)
        queries = projected(plan.x, "q", plan.compute)
        if len(plan.context) == 1:
            return queries + projected(plan.context[0], "kv", plan.compute)
        return queries + [rounded(array, plan.compute) for array in plan.context]

    def _finish(self, result: Array | AttentionResult, plan: _Plan, out: Array | None) -> Array | AttentionResult:
        """Concatenates the heads, projects by w_o, and gives everything the caller's dtype and axes."""
        joined = (result.out if isinstance(result, AttentionResult) else result).swapaxes(-2, -3)
        joined = joined.reshape(*joined.shape[:-2], self.num_heads * self.value_dim)
        index = (0,) * plan.added
        projected = rounded(times(joined, self._w_o, self._b_o, plan.compute)[index], plan.dtype)
        if out is None:
            out = projected
        else:
            out[...] = projected
        if not isinstance(result, AttentionResult):
            return out
        lse = None if result.lse is None else result.lse[index]
        weights = None if result.weights is None else rounded(result.weights[index], plan.dtype)
        return AttentionResult(out, lse, weights)


def _rows(name: str, value: Any, width: int) -> Array:
    array = as_array(NAME, name, value)
    if array.ndim < 2 or array.shape[-1] != width:
        raise ValueError(f"{NAME}: {name} has shape {array.shape}; it must be (..., rows, {width}) for these weights")
    return array
