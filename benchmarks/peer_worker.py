"""The process that times one candidate on one case.

`python peer_worker.py CANDIDATE CASE THREADS JUDGE` is what `peers.py` starts for each candidate; the two speak in
lines of JSON. The process prepares the call of `peer_calls.py`, checks its result, says "ready", and then, for each
line with a number of milliseconds, runs the call for about that long and answers with the seconds per call.
"""

import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
from cases import Judge, find_cases, make_inputs
from peer_calls import CANDIDATES, Call, Unsupported


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
    call = CANDIDATES[name].call(case, make_inputs(case), threads)
    with np.load(judge_file) as saved:
        judge = Judge(saved["exact"], float(saved["allowed"]), saved.get("rows"))
    call.run()
    error = judge.error(call.to_numpy(call.run()))  # the second result: a call must not spoil what it is given
    status = "ready" if judge.accepts(error) else "wrong"
    return call, {"status": status, "error": error, "allowed": judge.allowed, "details": call.details}


def write_judge(case_name: str, judge_file: str) -> None:
    """Compute the exact result of a case and save it for the processes of the candidates."""
    case = find_cases(case_name)[0]
    judge = Judge.of_case(case, make_inputs(case))
    rows = {} if judge.rows is None else {"rows": judge.rows}
    np.savez(judge_file, exact=judge.exact, allowed=judge.allowed, **rows)


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
