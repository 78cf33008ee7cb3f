"""How each library is asked for attention, and the process that times one of them.

Every `prepare_…` function turns a case into a call without arguments, doing all that need not be repeated first: it
converts the inputs to the library's own tensors and its preferred layout, builds or compiles the graph, and binds the
inputs. The library gets its quickest public interface. What it cannot compute raises `Unsupported` with the reason.

`python peer_calls.py CANDIDATE CASE THREADS JUDGE` is the process that `peers.py` starts for each candidate; the two
speak in lines of JSON. The process prepares the call, checks its result, says "ready", and then, for each line with a
number of milliseconds, runs the call for about that long and answers with the seconds per call. A library is imported
only in the process of its own candidate.
"""

import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from cases import Case, Inputs, Judge, find_cases, make_inputs, numpy_dtype


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


# --- ours and NumPy -------------------------------------------------------------------------------------------------


def prepare_ours(case: Case, inputs: Inputs, threads: int) -> Call:
    """attentile, through the public function."""
    import attentile

    def run() -> np.ndarray:
        return attentile.attention(
            inputs.query,
            inputs.key,
            inputs.value,
            mask=inputs.mask,
            bias=inputs.bias,
            causal=inputs.causal,
            num_threads=threads,
        )

    if case.dtype in ("float16", "bfloat16"):
        one = np.ones((1, 1, 1, 1), inputs.query.dtype)
        try:
            supported = attentile.attention(one, one, one).dtype == one.dtype
        except (TypeError, NotImplementedError):
            supported = False
        if not supported:
            raise Unsupported(f"this version does not compute {case.dtype}")
    config = attentile.show_config(as_dict=True)
    return Call(run, details=", ".join(f"{name} {config.get(name)}" for name in ("version", "isa")))


def prepare_numpy(case: Case, inputs: Inputs, threads: int) -> Call:
    """The few lines of NumPy that people write, with its avoidable copies avoided. Half precision goes by float32."""
    B, Hq, L, D = inputs.query.shape
    Hkv, S = inputs.key.shape[1:3]
    group = Hq // Hkv
    working = np.float64 if case.dtype == "float64" else np.float32
    scale, low = working(1 / np.sqrt(D)), working(-1e9)
    allowed = np.tri(L, S, dtype=bool) if inputs.causal else inputs.mask
    forbidden = None if allowed is None else ~allowed

    def run() -> np.ndarray:
        query = inputs.query.astype(working, copy=False)
        key = inputs.key.astype(working, copy=False)[:, :, None]
        value = inputs.value.astype(working, copy=False)[:, :, None]
        scores = query.reshape(B, Hkv, group, L, D) @ np.swapaxes(key, -1, -2)
        scores = scores.reshape(B, Hq, L, S)
        scores *= scale
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


def prepare_torch(case: Case, inputs: Inputs, threads: int) -> Call:
    """torch.nn.functional.scaled_dot_product_attention."""
    import torch

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    dtype = getattr(torch, case.dtype)
    via = np.float64 if case.dtype == "float64" else np.float32  # from_numpy does not take bfloat16
    query, key, value = (
        torch.from_numpy(array.astype(via)).to(dtype) for array in (inputs.query, inputs.key, inputs.value)
    )
    mask = None
    if inputs.mask is not None:
        mask = torch.from_numpy(inputs.mask)
    elif inputs.bias is not None:
        mask = torch.from_numpy(inputs.bias.astype(via)).to(dtype)
    attention = torch.nn.functional.scaled_dot_product_attention
    grouped = case.Hq != case.Hkv

    def run() -> torch.Tensor:
        return attention(query, key, value, attn_mask=mask, is_causal=inputs.causal, enable_gqa=grouped)

    return Call(run, lambda out: out.to(torch.float64).numpy())


def prepare_jax(case: Case, inputs: Inputs, threads: int) -> Call:
    """jax.nn.dot_product_attention, compiled. Its threads are bounded by the CPUs the process may use.

    float16, which it refuses on CPUs, goes by float32 within the compiled function.
    """
    import jax

    jax.config.update("jax_enable_x64", True)
    query, key, value = (jax.numpy.asarray(heads_last(array)) for array in (inputs.query, inputs.key, inputs.value))
    dtype = query.dtype
    masks = {"mask": inputs.mask, "bias": inputs.bias}
    extra = {name: jax.numpy.asarray(array) for name, array in masks.items() if array is not None}

    @jax.jit
    def attention(query: jax.Array, key: jax.Array, value: jax.Array, extra: dict[str, jax.Array]) -> jax.Array:
        if case.dtype == "float16":
            query, key, value = (array.astype("float32") for array in (query, key, value))
        return jax.nn.dot_product_attention(query, key, value, is_causal=inputs.causal, **extra).astype(dtype)

    def run() -> jax.Array:
        return attention(query, key, value, extra).block_until_ready()

    return Call(run, lambda out: heads_last(np.asarray(out)))


def prepare_openvino(case: Case, inputs: Inputs, threads: int) -> Call:
    """The ScaledDotProductAttention operation, at the precision of the inputs; key heads are repeated in the graph."""
    import openvino
    from openvino import opset13 as operations

    if case.dtype == "float64":
        raise Unsupported("computes float64 in float32")
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
    if case.mask:
        arrays.append(inputs.mask if inputs.mask is not None else inputs.bias)
        parameters.append(operations.parameter(list(arrays[-1].shape), arrays[-1].dtype))
        nodes.append(parameters[-1])
    model = openvino.Model([operations.scaled_dot_product_attention(*nodes, causal=inputs.causal)], parameters)
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
    mask = inputs.mask if inputs.mask is not None else inputs.bias
    if mask is not None:  # its last two axes must be written out
        mask = np.broadcast_to(mask, (*mask.shape[:2], case.L, case.S)).copy()
    feeds = {"query": inputs.query, "key": inputs.key, "value": inputs.value, "mask": mask}
    return onnxruntime_call("Attention", feeds, threads, np.asarray, is_causal=int(inputs.causal))


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
    if not (inputs.causal or case.L == 1) or case.mask:
        raise Unsupported("causal only, without a mask")
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
    attributes = {"num_heads": case.Hq, "kv_num_heads": case.Hkv}
    return onnxruntime_call("GroupQueryAttention", feeds, threads, split_heads(case), cache, **attributes)


@dataclass(frozen=True)
class Candidate:
    """A library, or one of several ways to ask it."""

    title: str
    package: str
    prepare: Callable[[Case, Inputs, int], Call]


OURS = "ours"
CANDIDATES = {
    OURS: Candidate("attentile", "attentile", prepare_ours),
    "torch": Candidate("PyTorch", "torch", prepare_torch),
    "ort": Candidate("ONNX Runtime, Attention", "onnxruntime", prepare_onnxruntime),
    "ort-mha": Candidate("ONNX Runtime, MultiHeadAttention", "onnxruntime", prepare_multi_head),
    "ort-gqa": Candidate("ONNX Runtime, GroupQueryAttention", "onnxruntime", prepare_grouped_query),
    "openvino": Candidate("OpenVINO", "openvino", prepare_openvino),
    "jax": Candidate("JAX", "jax", prepare_jax),
    "numpy": Candidate("NumPy", "numpy", prepare_numpy),
}


# --- the process of one candidate -----------------------------------------------------------------------------------


def seconds_per_call(run: Callable[[], Any], milliseconds: float) -> float:
    """Run for about this long and return the median; the calls of the first tenth wake caches and threads, untimed."""
    started = time.perf_counter()
    while True:
        run()
        if time.perf_counter() - started > milliseconds / 10_000:
            break
    samples = []
    started = time.perf_counter()
    while True:
        before = time.perf_counter()
        run()
        after = time.perf_counter()
        samples.append(after - before)
        if after - started > milliseconds / 1000:
            return statistics.median(samples)


def prepare_and_check(name: str, case_name: str, threads: int, judge_file: str) -> tuple[Call, dict[str, Any]]:
    """The call of a candidate and its first answer to `peers.py`: how far its result is from the exact one."""
    case = find_cases(case_name)[0]
    call = CANDIDATES[name].prepare(case, make_inputs(case), threads)
    with np.load(judge_file) as saved:
        judge = Judge(saved["exact"], float(saved["allowed"]))
    call.run()
    error = judge.error(call.to_numpy(call.run()))  # the second result: a call must not spoil what it is given
    status = "ready" if judge.accepts(error) else "wrong"
    return call, {"status": status, "error": error, "allowed": judge.allowed, "details": call.details}


def write_judge(case_name: str, judge_file: str) -> None:
    """Compute the exact result of a case and save it for the processes of the candidates."""
    case = find_cases(case_name)[0]
    judge = Judge.of_case(case, make_inputs(case))
    np.savez(judge_file, exact=judge.exact, allowed=judge.allowed)


def main(arguments: list[str]) -> None:
    """Serve `peers.py`: see the top of this file. The candidate `judge` writes the file that the others read."""
    name, case_name, threads, judge_file = arguments
    channel = os.fdopen(os.dup(1), "w")  # stdout proper; what the libraries print there goes to stderr
    os.dup2(2, 1)

    def say(**message: Any) -> None:
        print(json.dumps(message), file=channel, flush=True)

    try:
        if name == "judge":
            write_judge(case_name, judge_file)
            return say(status="ready")
        call, answer = prepare_and_check(name, case_name, int(threads), judge_file)
        say(**answer)
    except Unsupported as reason:
        return say(status="unsupported", note=str(reason))
    except ImportError as error:
        return say(status="absent", note=str(error))
    except Exception as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines() or [""]
        return say(status="failed", note=f"{type(error).__name__}: {lines[0][:200]}")
    for line in sys.stdin:
        say(status="timed", seconds=seconds_per_call(call.run, float(line)))


if __name__ == "__main__":
    main(sys.argv[1:])
