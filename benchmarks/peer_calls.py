"""How each library is asked for attention.

Every `prepare_…` function turns a case into a call without arguments, doing all that need not be repeated first: it
converts the inputs to the library's own tensors and its preferred layout, builds or compiles the graph, and binds the
inputs. The library gets its quickest public interface. What it cannot compute raises `Unsupported` with the reason.
A library is imported only when a call of its own is prepared: `peer_worker.py` does that in a process for each.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from cases import Case, Inputs, joined, numpy_dtype


class Unsupported(Exception):
    """The candidate does not offer what the case needs."""


@dataclass(frozen=True)
class Call:
    """A prepared computation: `run()` is what is timed, `to_numpy(run())` its result as (B, Hq, L, D)."""

    run: Callable[[], Any]
    to_numpy: Callable[[Any], np.ndarray] = np.asarray
    details: str = ""
    keep: Any = None  # what must outlive the calls: some libraries share the memory of an array without holding it


def heads_last(array: np.ndarray) -> np.ndarray:
    """(B, H, L, D) as a contiguous (B, L, H, D), and the reverse."""
    return np.ascontiguousarray(np.swapaxes(array, 1, 2))


def dense_mask(inputs: Inputs) -> tuple[np.ndarray | None, bool]:
    """The mask or bias to pass to a library without windows and segments, and whether `causal` is still to be said."""
    if inputs.window is not None or inputs.segments is not None:
        return inputs.visible(), False
    if inputs.slopes is not None:  # the bias holds the causal order, and some take only one of both
        return inputs.bias, False
    return inputs.mask if inputs.mask is not None else inputs.bias, inputs.causal


# --- ours and NumPy -------------------------------------------------------------------------------------------------


def prepare_ours(case: Case, inputs: Inputs, threads: int) -> Call:
    """attentile, through the public function."""
    import attentile

    options = inputs.options

    def run() -> np.ndarray:
        return attentile.attention(inputs.query, inputs.key, inputs.value, num_threads=threads, **options)

    config = attentile.show_config(as_dict=True)
    return Call(run, details=", ".join(f"{name} {config.get(name)}" for name in ("version", "isa")))


def prepare_cache(case: Case, inputs: Inputs, threads: int) -> Call:
    """attentile's KVCache, which stores keys in the layout that a decode step reads."""
    import attentile

    if case.L != 1 or case.mask or case.window or case.segments or case.softcap or case.alibi:
        raise Unsupported("decode steps without a mask only")
    attentile.set_num_threads(threads)
    cache = attentile.KVCache(case.B, case.Hkv, case.D, dtype=inputs.key.dtype)
    cache.append(inputs.key, inputs.value)
    return Call(lambda: cache.attend(inputs.query))


def prepare_numpy(case: Case, inputs: Inputs, threads: int) -> Call:
    """The few lines of NumPy that people write, with its avoidable copies avoided. Half precision goes by float32."""
    B, Hq, L, D = inputs.query.shape
    Hkv, S = inputs.key.shape[1:3]
    group = Hq // Hkv
    working = np.float64 if case.dtype == "float64" else np.float32
    scale, low = working(1 / np.sqrt(D)), working(-1e9)
    cap = None if inputs.softcap is None else working(inputs.softcap)
    visible = inputs.visible()
    forbidden = None if visible is None else ~visible

    def run() -> np.ndarray:
        query = inputs.query.astype(working, copy=False)
        key = inputs.key.astype(working, copy=False)[:, :, None]
        value = inputs.value.astype(working, copy=False)[:, :, None]
        scores = query.reshape(B, Hkv, group, L, D) @ np.swapaxes(key, -1, -2)
        scores = scores.reshape(B, Hq, L, S)
        scores *= scale if cap is None else scale / cap
        if cap is not None:
            np.tanh(scores, out=scores)
            scores *= cap
        if inputs.bias is not None:
            scores += inputs.bias
        if forbidden is not None:
            np.copyto(scores, low, where=forbidden)
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        out = scores.reshape(B, Hkv, group, L, S) @ value
        return out.reshape(B, Hq, L, D).astype(inputs.query.dtype, copy=False)

    return Call(run, details=blas_of_numpy())


def blas_of_numpy() -> str:
    """Name, version and kernels of the BLAS that NumPy has loaded, if threadpoolctl is installed to ask."""
    try:
        from threadpoolctl import threadpool_info
    except ImportError:
        return ""
    pools = [pool for pool in threadpool_info() if pool.get("user_api") == "blas"]
    return ", ".join(f"{pool['internal_api']} {pool['version']} {pool.get('architecture', '')}" for pool in pools)


# --- PyTorch, JAX, OpenVINO -----------------------------------------------------------------------------------------


def torch_tensors(case: Case, threads: int, *arrays: np.ndarray | None) -> list[Any]:
    """Arrays as tensors, those that are not boolean in the dtype of the case; PyTorch is set up for inference."""
    import torch

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    dtype = getattr(torch, case.dtype)
    via = np.float64 if case.dtype == "float64" else np.float32  # from_numpy does not take bfloat16

    def tensor(array: np.ndarray | None) -> torch.Tensor | None:
        if array is None or array.dtype == bool:
            return None if array is None else torch.from_numpy(array)
        return torch.from_numpy(array.astype(via)).to(dtype)

    return [tensor(array) for array in arrays]


def prepare_torch(case: Case, inputs: Inputs, threads: int) -> Call:
    """torch.nn.functional.scaled_dot_product_attention; for a softcap, which it lacks, PyTorch's eager operations."""
    import torch

    mask, causal = dense_mask(inputs)
    query, key, value, mask = torch_tensors(case, threads, inputs.query, inputs.key, inputs.value, mask)
    attention = torch.nn.functional.scaled_dot_product_attention
    grouped = case.Hq != case.Hkv

    def run() -> torch.Tensor:
        return attention(query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=grouped)

    if inputs.softcap is not None:
        return softcap_in_torch(case, inputs, query, key, value)
    return Call(run, lambda out: out.to(torch.float64).numpy())


def softcap_in_torch(case: Case, inputs: Inputs, query: Any, key: Any, value: Any) -> Call:
    """Softcapped attention operation by operation, in place where that is possible."""
    import torch

    if case.Hq != case.Hkv or inputs.bias is not None:
        raise Unsupported("softcap is composed for equal heads without a bias only")
    visible = inputs.visible()
    forbidden = None if visible is None else torch.from_numpy(~visible)
    cap, scale = inputs.softcap, case.D**-0.5

    def run() -> torch.Tensor:
        scores = torch.matmul(query, key.mT).mul_(scale / cap).tanh_().mul_(cap)
        if forbidden is not None:
            scores.masked_fill_(forbidden, -torch.inf)
        return torch.matmul(torch.softmax(scores, dim=-1), value)

    return Call(run, lambda out: out.to(torch.float64).numpy())


def prepare_flex(case: Case, inputs: Inputs, threads: int) -> Call:
    """flex_attention under torch.compile, which needs a C++ compiler, for what scaled_dot_product_attention lacks."""
    if not (inputs.window or inputs.softcap or inputs.segments is not None):
        raise Unsupported("timed only with a window, segments or a softcap; the rest is for torch")
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    query, key, value = torch_tensors(case, threads, inputs.query, inputs.key, inputs.value)
    window, cap = inputs.window or case.S, inputs.softcap
    segments = None if inputs.segments is None else torch.from_numpy(inputs.segments)

    def causal(b: Any, h: Any, row: Any, key: Any) -> Any:
        return (row >= key) & (row - key < window)

    def same_segment(b: Any, h: Any, row: Any, key: Any) -> Any:
        return segments[row] == segments[key]

    def capped(score: Any, b: Any, h: Any, row: Any, key: Any) -> Any:
        return cap * torch.tanh(score / cap)

    if inputs.mask is not None or inputs.bias is not None or (inputs.causal and segments is not None):
        raise Unsupported("not written for a mask or bias, nor for causal segments")
    form = causal if inputs.causal else same_segment if segments is not None else None
    blocks = None if form is None else create_block_mask(form, None, None, case.L, case.S, device="cpu")
    compiled = torch.compile(flex_attention, fullgraph=True)
    options = {"score_mod": capped if cap else None, "block_mask": blocks, "enable_gqa": case.Hq != case.Hkv}

    return Call(lambda: compiled(query, key, value, **options), lambda out: out.to(torch.float64).numpy())


def prepare_jax(case: Case, inputs: Inputs, threads: int) -> Call:
    """jax.nn.dot_product_attention, compiled. Its threads are bounded by the CPUs the process may use.

    float16, which it refuses on CPUs, goes by float32 within the compiled function.
    """
    if inputs.softcap is not None:
        raise Unsupported("no softcap")
    import jax

    jax.config.update("jax_enable_x64", True)
    query, key, value = (jax.numpy.asarray(heads_last(array)) for array in (inputs.query, inputs.key, inputs.value))
    dtype = query.dtype
    masks = {"mask": inputs.mask if inputs.segments is None else inputs.visible(), "bias": inputs.bias}
    window = None if inputs.window is None else (inputs.window - 1, 0)
    options = {"is_causal": inputs.causal, "local_window_size": window}
    extra = {name: jax.numpy.asarray(array) for name, array in masks.items() if array is not None}

    @jax.jit
    def attention(query: jax.Array, key: jax.Array, value: jax.Array, extra: dict[str, jax.Array]) -> jax.Array:
        if case.dtype == "float16":
            query, key, value = (array.astype("float32") for array in (query, key, value))
        return jax.nn.dot_product_attention(query, key, value, **options, **extra).astype(dtype)

    def run() -> jax.Array:
        return attention(query, key, value, extra).block_until_ready()

    return Call(run, lambda out: heads_last(np.asarray(out)))


def prepare_openvino(case: Case, inputs: Inputs, threads: int) -> Call:
    """The ScaledDotProductAttention operation, at the precision of the inputs; key heads are repeated in the graph."""
    import openvino
    from openvino import opset13 as operations

    if case.dtype == "float64":
        raise Unsupported("computes float64 in float32")
    if inputs.softcap is not None:
        raise Unsupported("no softcap")
    element = {"float32": openvino.Type.f32, "float16": openvino.Type.f16, "bfloat16": openvino.Type.bf16}[case.dtype]

    def all_heads(node: Any) -> Any:
        if case.Hkv == case.Hq:
            return node
        repeated = np.array([case.B, case.Hkv, case.Hq // case.Hkv, case.S, case.D])
        node = operations.broadcast(operations.unsqueeze(node, operations.constant(2)), operations.constant(repeated))
        joined = np.array([case.B, case.Hq, case.S, case.D])
        return operations.reshape(node, operations.constant(joined), special_zero=False)

    arrays = [inputs.query, inputs.key, inputs.value]
    parameters = [operations.parameter(list(array.shape), element) for array in arrays]
    nodes = [parameters[0], all_heads(parameters[1]), all_heads(parameters[2])]
    mask, causal = dense_mask(inputs)
    if mask is not None:
        arrays.append(mask)
        parameters.append(operations.parameter(list(arrays[-1].shape), arrays[-1].dtype))
        nodes.append(parameters[-1])
    model = openvino.Model([operations.scaled_dot_product_attention(*nodes, causal=causal)], parameters)
    core = openvino.Core()
    native_bfloat16 = "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    options = {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": "bf16" if case.dtype == "bfloat16" and native_bfloat16 else "f32",
        "PERFORMANCE_HINT": "LATENCY",
    }
    request = core.compile_model(model, "CPU", options).create_infer_request()
    for index, array in enumerate(arrays):
        if case.dtype == "bfloat16":
            tensor = openvino.Tensor(array.view(np.uint16), list(array.shape), element)
        else:
            tensor = openvino.Tensor(array, shared_memory=True)
        request.set_input_tensor(index, tensor)

    def to_numpy(_: Any) -> np.ndarray:
        out = np.array(request.get_output_tensor(0).data)
        return out.view(numpy_dtype("bfloat16")) if case.dtype == "bfloat16" else out

    return Call(lambda: request.infer(share_outputs=True), to_numpy, keep=arrays)


# --- gradients ------------------------------------------------------------------------------------------------------


def gradients_of_ours(case: Case, inputs: Inputs, threads: int) -> Call:
    """attentile.attention_vjp, forward and backward."""
    import attentile

    arrays = inputs.query, inputs.key, inputs.value

    def run() -> tuple[np.ndarray, ...]:
        out, vjp = attentile.attention_vjp(*arrays, num_threads=threads, **inputs.options)
        return out, *vjp(inputs.gradient)[:3]

    return Call(run, lambda parts: joined(*parts), details=f"isa {attentile.show_config(as_dict=True)['isa']}")


def gradients_of_torch(case: Case, inputs: Inputs, threads: int) -> Call:
    """scaled_dot_product_attention under autograd."""
    import torch

    arrays = inputs.query, inputs.key, inputs.value, inputs.gradient
    query, key, value, gradient = torch_tensors(case, threads, *arrays)
    torch.set_grad_enabled(True)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    attention = torch.nn.functional.scaled_dot_product_attention

    def run() -> tuple[Any, ...]:
        out = attention(*leaves, is_causal=inputs.causal, enable_gqa=case.Hq != case.Hkv)
        return out.detach(), *torch.autograd.grad(out, leaves, gradient)

    return Call(run, lambda parts: joined(*(part.numpy() for part in parts)))


def gradients_of_jax(case: Case, inputs: Inputs, threads: int) -> Call:
    """jax.vjp of jax.nn.dot_product_attention, compiled with the forward pass."""
    import jax

    jax.config.update("jax_enable_x64", True)
    arrays = inputs.query, inputs.key, inputs.value, inputs.gradient
    query, key, value, gradient = (jax.numpy.asarray(heads_last(array)) for array in arrays)

    def attention(query: Any, key: Any, value: Any) -> Any:
        return jax.nn.dot_product_attention(query, key, value, is_causal=inputs.causal)

    @jax.jit
    def both(query: Any, key: Any, value: Any, gradient: Any) -> tuple[Any, ...]:
        out, backward = jax.vjp(attention, query, key, value)
        return out, *backward(gradient)

    def run() -> Any:
        return jax.block_until_ready(both(query, key, value, gradient))

    return Call(run, lambda parts: joined(*(heads_last(np.asarray(part)) for part in parts)))


def gradients_of_numpy(case: Case, inputs: Inputs, threads: int) -> Call:
    """The formula as people write it, which stores the weights for the way back."""
    from formulas import attention_and_gradients

    arrays = inputs.query, inputs.key, inputs.value, inputs.gradient
    visible = inputs.visible()
    return Call(lambda: attention_and_gradients(*arrays, visible), lambda parts: joined(*parts))


# --- ONNX Runtime ---------------------------------------------------------------------------------------------------


def onnxruntime_call(
    operator: str,
    feeds: dict[str, np.ndarray | None],
    threads: int,
    to_numpy: Callable[[Any], np.ndarray],
    written_over: dict[str, str] | None = None,
    **attributes: Any,
) -> Call:
    """A session of a single operator, its inputs bound.

    `feeds` names the operator's inputs in order, None for one left out. Its outputs are `out` and then those of
    `written_over`, each of which takes the memory of the input named with it. The operator Attention is of the ONNX
    standard, all others are of the domain com.microsoft.
    """
    import onnxruntime
    from onnx import helper

    arrays = {name: array for name, array in feeds.items() if array is not None}
    element = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in arrays.items()}
    outputs = ["out", *(written_over or {})]
    domain = "" if operator == "Attention" else "com.microsoft"
    arguments = [name if name in arrays else "" for name in feeds]
    graph = helper.make_graph(
        [helper.make_node(operator, arguments, outputs, domain=domain, **attributes)],
        "benchmark",
        [helper.make_tensor_value_info(name, element[name], array.shape) for name, array in arrays.items()],
        [helper.make_tensor_value_info(name, element["query"], None) for name in outputs],
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in arrays.items()}
    binding = session.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("out", "cpu")
    for name, overwritten in (written_over or {}).items():
        binding.bind_ortvalue_output(name, values[overwritten])

    def run() -> Any:
        session.run_with_iobinding(binding)
        return binding.get_outputs()[0]

    return Call(run, lambda out: to_numpy(out.numpy()), keep=(arrays, values))


def prepare_onnxruntime(case: Case, inputs: Inputs, threads: int) -> Call:
    """The standard ONNX operator Attention."""
    if case.dtype == "bfloat16":
        raise Unsupported("no bfloat16 on CPUs")
    mask, causal = dense_mask(inputs)
    if mask is not None:  # its last two axes must be written out
        mask = np.broadcast_to(mask, (*mask.shape[:2], case.L, case.S)).copy()
    feeds = {"query": inputs.query, "key": inputs.key, "value": inputs.value, "mask": mask}
    attributes = {"is_causal": int(causal), "softcap": inputs.softcap or 0.0}
    return onnxruntime_call("Attention", feeds, threads, np.asarray, **attributes)


def joined_heads(array: np.ndarray) -> np.ndarray:
    """(B, H, L, D) as (B, L, H·D), the layout of ONNX Runtime's own operators."""
    return heads_last(array).reshape(array.shape[0], array.shape[2], -1)


def split_heads(case: Case) -> Callable[[np.ndarray], np.ndarray]:
    """The way back: a function that turns (B, L, Hq·D) into (B, Hq, L, D)."""
    return lambda out: heads_last(out.reshape(case.B, case.L, case.Hq, case.D))


def prepare_multi_head(case: Case, inputs: Inputs, threads: int) -> Call:
    """ONNX Runtime's operator MultiHeadAttention."""
    if case.Hq != case.Hkv:
        raise Unsupported("needs as many key heads as query heads")
    if case.dtype not in ("float32", "float16"):
        raise Unsupported(f"no {case.dtype} on CPUs")
    if inputs.softcap is not None:
        raise Unsupported("no softcap")
    if inputs.window is not None or inputs.segments is not None:
        raise Unsupported("no window or segments, but through a dense bias, for which ort stands")
    feeds: dict[str, np.ndarray | None] = {
        "query": joined_heads(inputs.query),
        "key": joined_heads(inputs.key),
        "value": joined_heads(inputs.value),
        "projection_bias": None,
        "key_lengths": None if inputs.mask is None else inputs.mask[:, 0, 0].sum(axis=-1).astype(np.int32),
        "score_bias": inputs.bias,
    }
    attributes = {"num_heads": case.Hq, "unidirectional": int(inputs.causal)}
    return onnxruntime_call("MultiHeadAttention", feeds, threads, split_heads(case), **attributes)


def prepare_grouped_query(case: Case, inputs: Inputs, threads: int) -> Call:
    """ONNX Runtime's operator GroupQueryAttention, with the key-value cache written in place as in token generation."""
    if not (inputs.causal or case.L == 1) or case.mask or case.segments or case.alibi:
        raise Unsupported("causal only, without a mask, a bias or segments")
    if case.dtype not in ("float32", "float16"):
        raise Unsupported(f"no {case.dtype} on CPUs")
    past = case.S - case.L  # keys in the cache before the call; the rows' own keys are appended by it
    feeds: dict[str, np.ndarray | None] = {
        "query": joined_heads(inputs.query),
        "key": joined_heads(inputs.key[:, :, past:]),
        "value": joined_heads(inputs.value[:, :, past:]),
        "past_key": inputs.key.copy(),
        "past_value": inputs.value.copy(),
        "last_key_index": np.full(case.B, case.S - 1, np.int32),
        "key_count": np.array(case.S, np.int32),
    }
    cache = {"present_key": "past_key", "present_value": "past_value"}
    attributes = {"num_heads": case.Hq, "kv_num_heads": case.Hkv, "softcap": inputs.softcap or 0.0}
    attributes["local_window_size"] = inputs.window or -1
    return onnxruntime_call("GroupQueryAttention", feeds, threads, split_heads(case), cache, **attributes)


@dataclass(frozen=True)
class Candidate:
    """A library, or one of several ways to ask it."""

    title: str
    package: str
    prepare: Callable[[Case, Inputs, int], Call]
    colour: str  # in the plot; by Okabe and Ito, told apart with any colour vision
    prepare_gradients: Callable[[Case, Inputs, int], Call] | None = None

    def call(self, case: Case, inputs: Inputs, threads: int) -> Call:
        """What is timed."""
        if not case.train:
            return self.prepare(case, inputs, threads)
        if self.prepare_gradients is None:
            raise Unsupported("no gradients")
        return self.prepare_gradients(case, inputs, threads)


OURS, OURS_TOO = "ours", "cache"
CANDIDATES = {
    OURS: Candidate("attentile", "attentile", prepare_ours, "#222222", gradients_of_ours),
    OURS_TOO: Candidate("attentile, KVCache", "attentile", prepare_cache, "#777777"),
    "torch": Candidate("PyTorch", "torch", prepare_torch, "#D55E00", gradients_of_torch),
    "flex": Candidate("PyTorch, flex_attention", "torch", prepare_flex, "#F0A88C"),
    "ort": Candidate("ONNX Runtime, Attention", "onnxruntime", prepare_onnxruntime, "#0072B2"),
    "ort-mha": Candidate("ONNX Runtime, MultiHeadAttention", "onnxruntime", prepare_multi_head, "#56B4E9"),
    "ort-gqa": Candidate("ONNX Runtime, GroupQueryAttention", "onnxruntime", prepare_grouped_query, "#9AD1F0"),
    "openvino": Candidate("OpenVINO", "openvino", prepare_openvino, "#CC79A7"),
    "jax": Candidate("JAX", "jax", prepare_jax, "#009E73", gradients_of_jax),
    "numpy": Candidate("NumPy", "numpy", prepare_numpy, "#E69F00", gradients_of_numpy),
}
