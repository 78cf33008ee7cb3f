"""Times attention on CPUs side by side: attentile, PyTorch, ONNX Runtime, OpenVINO, JAX and NumPy.

    python benchmarks/peers.py                                  all cases, all candidates that are installed
    python benchmarks/peers.py --cases bert512,dec-gpt2 --with ours,torch --threads 1
    python benchmarks/peers.py --rounds 15 --json peers.json --plot peers.png

A thread pool that spins while it waits for work ruins its neighbours, and two libraries in one process share an OpenMP
runtime, a BLAS and a floating-point mode. Hence each candidate gets a process of its own and the processes take turns:

    round 1   ours ── torch ── ort ── …
    round 2   torch ── ort ── … ── ours       (each round starts with the next candidate)

A process that waits is stopped (SIGSTOP), for the pool of ONNX Runtime spins on for 35 ms after its turn and that of
OpenBLAS for 100 ms [measured on two cores].
Within a turn the call is repeated for `--ms` milliseconds and the median counts. Ours is compared with a peer by the
ratio of their times in the same round, and of these ratios the median counts: a machine that slows down for a second
slows both. Results are checked before anything is timed. `peer_calls.py` holds the calls, `peer_worker.py`
the processes, README.md says how to read the numbers.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cases import CASES, Case, find_cases
from peer_calls import CANDIDATES, OURS, OURS_TOO

CAN_STOP = hasattr(signal, "SIGSTOP")
PAUSE_SECONDS = 0.01 if CAN_STOP else 0.2  # before a turn
PATIENCE_SECONDS = 300  # a process that is silent for longer is ended
BLAS_TUNING = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")  # would make NumPy slower or faster than users see it


# --- processes ------------------------------------------------------------------------------------------------------


class Worker:
    """The process of one candidate for one case, spoken to in lines of JSON. It runs only while an answer is due."""

    def __init__(self, name: str, case: Case, threads: int, judge_file: str) -> None:
        program = str(Path(__file__).with_name("peer_worker.py"))
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process, closed by `close`
        self.process = subprocess.Popen(
            [sys.executable, program, name, case.name, str(threads), judge_file],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=worker_environment(threads),
        )

    def answer(self) -> dict[str, Any]:
        """Wait for the next line; a process that ended or hangs gives the status "failed"."""
        alarm = threading.Timer(PATIENCE_SECONDS, self.process.kill)
        alarm.daemon = True  # must not hold up our own end
        alarm.start()
        line = self.process.stdout.readline()
        alarm.cancel()
        if line:
            if CAN_STOP:
                self.process.send_signal(signal.SIGSTOP)
            return json.loads(line)
        self.errors.seek(0)
        last_words = self.errors.read().decode(errors="replace").strip().splitlines()[-1:]
        return {"status": "failed", "note": f"ended with code {self.process.wait()} {' '.join(last_words)[:200]}"}

    def take_turn(self, milliseconds: float) -> dict[str, Any]:
        """Have the call timed for about this long."""
        if CAN_STOP:
            self.process.send_signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):  # of a process that died; the answer will tell
            print(milliseconds, file=self.process.stdin, flush=True)
        return self.answer()

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()
        self.errors.close()


def worker_environment(threads: int) -> dict[str, str]:
    """The environment of the workers: every library that listens is told the number of threads."""
    environment = {name: value for name, value in os.environ.items() if name not in BLAS_TUNING}
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "PJRT_NPROC"):
        environment[name] = str(threads)
    return environment


def available_cpus() -> list[int]:
    """The CPUs this process may use, one of each core first."""
    if not hasattr(os, "sched_getaffinity"):
        return list(range(os.cpu_count() or 1))
    order: list[tuple[int, int]] = []
    seen: Counter[str] = Counter()
    for cpu in sorted(os.sched_getaffinity(0)):
        try:
            core = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
        except OSError:
            core = str(cpu)
        order.append((seen[core], cpu))
        seen[core] += 1
    return [cpu for _, cpu in sorted(order)]


def confine(threads: int) -> None:
    """Bind this process, and so its workers, to as many CPUs as there are threads: not every library takes a number."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, available_cpus()[:threads])


# --- measuring ------------------------------------------------------------------------------------------------------


@dataclass
class Measurement:
    """What came of one candidate on one case.

    `status` is "ready", "wrong" (timed all the same, but no rival), "unsupported", "absent" or "failed".
    """

    status: str
    note: str = ""
    details: str = ""
    error: float | None = None
    allowed: float | None = None
    seconds: list[float] = field(default_factory=list)  # per round

    @property
    def median(self) -> float:
        """Seconds per call, the median over the rounds."""
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Ratio:
    """Time of a peer over ours, paired by round: the median and the extremes. Above 1, ours is faster."""

    median: float
    low: float
    high: float


@dataclass
class Comparison:
    """All candidates on one case."""

    case: Case
    measurements: dict[str, Measurement]

    def timed(self, name: str) -> bool:
        """True if the candidate has a time, right or wrong."""
        return name in self.measurements and bool(self.measurements[name].seconds)

    def ratio(self, peer: str) -> Ratio | None:
        """Ours against a peer; None unless both were timed."""
        if not (self.timed(OURS) and self.timed(peer)):
            return None
        pairs = zip(self.measurements[peer].seconds, self.measurements[OURS].seconds, strict=True)
        ratios = [theirs / ours for theirs, ours in pairs]
        return Ratio(statistics.median(ratios), min(ratios), max(ratios))

    def best_peer(self) -> str | None:
        """The fastest peer with a right result."""
        rivals = [
            name for name, one in self.measurements.items() if name not in (OURS, OURS_TOO) and one.status == "ready"
        ]
        return min(rivals, key=lambda name: self.measurements[name].median, default=None)

    def gflops(self, name: str) -> float:
        """Useful work per time."""
        return self.case.flops / self.measurements[name].median / 1e9


def compare(case: Case, names: list[str], options: argparse.Namespace) -> Comparison:
    """Start the candidates, check their results, and let them take turns."""
    measurements: dict[str, Measurement] = {}
    workers: dict[str, Worker] = {}
    with tempfile.TemporaryDirectory() as directory:
        judge_file = str(Path(directory, "judge.npz"))
        judge = Worker("judge", case, options.threads, judge_file)
        answer = judge.answer()
        judge.close()
        if answer["status"] != "ready":  # ml_dtypes may be missing for bfloat16
            return Comparison(case, {name: Measurement(**answer) for name in names})
        try:
            for name in names:
                workers[name] = Worker(name, case, options.threads, judge_file)
                measurements[name] = Measurement(**workers[name].answer())
                if measurements[name].status not in ("ready", "wrong"):
                    workers.pop(name).close()
            take_turns(workers, measurements, options.rounds, options.ms)
        finally:
            for worker in workers.values():
                worker.close()
    return Comparison(case, measurements)


def take_turns(workers: dict[str, Worker], measurements: dict[str, Measurement], rounds: int, ms: float) -> None:
    """Fill in the seconds of each round. A candidate that breaks down loses all of them and takes part no more."""
    for turn in range(rounds):
        names = list(workers)
        first = turn % max(len(names), 1)
        for name in names[first:] + names[:first]:
            time.sleep(PAUSE_SECONDS)
            answer = workers[name].take_turn(ms)
            if answer["status"] == "timed":
                measurements[name].seconds.append(answer["seconds"])
            else:
                measurements[name] = Measurement(**answer)
                workers.pop(name).close()


# --- the tables -----------------------------------------------------------------------------------------------------


def milliseconds(seconds: float) -> str:
    """About four digits: 0.0042, 1.234, 1234.5."""
    value = seconds * 1e3
    return f"{value:.4f}" if value < 1 else f"{value:.3f}" if value < 100 else f"{value:.1f}"


def table_row(comparison: Comparison, names: list[str]) -> str:
    """One case: milliseconds per call, our GFLOP/s, the best peer, and its time over ours."""
    row = f"{comparison.case.name:<12}"
    for name in names:
        measurement = comparison.measurements[name]
        if comparison.timed(name):
            mark = "!" if measurement.status == "wrong" else ""
            row += f"{mark + milliseconds(measurement.median):>10}"
        else:
            row += f"{'failed' if measurement.status == 'failed' else '-':>10}"
    row += f"{comparison.gflops(OURS):>10.1f}" if comparison.timed(OURS) else f"{'-':>10}"
    best = comparison.best_peer()
    row += f"{best or '-':>11}"
    ratio = comparison.ratio(best) if best else None
    return row + (f"{ratio.median:>8.2f}   {ratio.low:.2f} – {ratio.high:.2f}" if ratio else f"{'-':>8}")


def geometric_mean(values: list[float]) -> float:
    """The mean that fits ratios."""
    return math.exp(statistics.fmean(map(math.log, values)))


def ratio_table(comparisons: list[Comparison], names: list[str]) -> str:
    """Ours against each peer, one case a line, and the geometric mean of each column."""
    peers = [name for name in names if name != OURS]
    lines = [f"{'case':<12}" + "".join(f"{name:>10}" for name in peers)]
    columns: dict[str, list[float]] = {name: [] for name in peers}
    for comparison in comparisons:
        row = f"{comparison.case.name:<12}"
        for name in peers:
            ratio = comparison.ratio(name)
            wrong = comparison.measurements[name].status == "wrong"
            row += f"{('!' if wrong else '') + format(ratio.median, '.2f') if ratio else '-':>10}"
            if ratio and not wrong:
                columns[name].append(ratio.median)
        lines.append(row)
    means = [f"{geometric_mean(columns[name]):.2f}" if columns[name] else "-" for name in peers]
    lines.append(f"{'geo. mean':<12}" + "".join(f"{mean:>10}" for mean in means))
    return "\n".join(lines)


def notes(comparisons: list[Comparison]) -> list[str]:
    """A line for each wrong result and each failure; absent libraries and what a library does not offer, once each."""
    lines, seen = [], set()
    for comparison in comparisons:
        for name, one in comparison.measurements.items():
            if one.status == "wrong":
                text = f"wrong or inexact: error {one.error:.1e}, allowed {one.allowed:.1e}; timed, but not a rival"
                lines.append(f"{comparison.case.name}, {name}: ! {text}")
            elif one.status == "failed":
                lines.append(f"{comparison.case.name}, {name}: failed: {one.note}")
            elif one.status != "ready" and (name, one.note) not in seen:
                seen.add((name, one.note))
                lines.append(f"{name}: {'not installed' if one.status == 'absent' else 'left out'}: {one.note}")
    return lines


# --- the machine ----------------------------------------------------------------------------------------------------


def processor_name() -> str:
    """The marketing name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def describe_machine(threads: int, names: list[str]) -> dict[str, Any]:
    """What a reader of the numbers must know about where they come from."""
    packages = [CANDIDATES[name].package for name in [*names, "numpy"]]
    versions: dict[str, str | None] = dict.fromkeys(packages)
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "processor": processor_name(),
        "cpus": len(available_cpus()),
        "threads": threads,
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": versions,
        "unset_for_workers": [name for name in BLAS_TUNING if name in os.environ],
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }


def print_machine(machine: dict[str, Any]) -> None:
    """The lines above the table."""
    load = "" if machine["load"] is None else f", load before the start {machine['load']:.1f}"
    print(f"{machine['processor']}, {machine['system']}, {machine['threads']} of {machine['cpus']} CPUs{load}")
    versions = ", ".join(f"{name} {version or '?'}" for name, version in machine["versions"].items())
    print(f"Python {machine['python']}, {versions}")
    if machine["load"] is not None and machine["load"] > 0.3 * machine["cpus"]:
        print("This machine is busy with other work: look at low – high before you believe a ratio.")
    if machine["unset_for_workers"]:
        print(f"unset for the candidates: {', '.join(machine['unset_for_workers'])}")


# --- the plot -------------------------------------------------------------------------------------------------------


def draw_group(axes: Any, comparison: Comparison, names: list[str], top: float) -> float:
    """The bars of one case downwards from `top`; returns where they end. A bar of length 1 is as fast as ours."""
    middle = top + (len(names) - 1) / 2
    for position, name in enumerate(names):
        speed = 1.0 if name == OURS else 1 / comparison.ratio(name).median
        wrong = comparison.measurements[name].status == "wrong"
        look = {"color": CANDIDATES[name].colour, "alpha": 0.35 if wrong else 1, "linewidth": 0}
        axes.barh(top + position, speed, height=0.86, **look)
        if name == OURS:
            label = f"{comparison.gflops(OURS):.3g} GFLOP/s"
        else:
            label = f"{speed:.2f}" + (f"  (error {comparison.measurements[name].error:.0e})" if wrong else "")
        place = {"textcoords": "offset points", "va": "center"}
        ground = {"facecolor": "white", "edgecolor": "none", "pad": 0.4}  # keeps the dashed line off the digits
        axes.annotate(label, (speed, top + position), (3, -0.5), fontsize=7, color="#444444", bbox=ground, **place)
    place = {"textcoords": "offset points", "ha": "right", "va": "top"}
    axes.annotate(comparison.case.name, (0, middle), (-5, 12), fontsize=9.5, weight="bold", **place)
    description = comparison.case.description.replace(", ", "\n", 1)
    axes.annotate(description, (0, middle), (-5, -1), fontsize=6.5, color="#666666", linespacing=1.25, **place)
    return top + len(names)


def plot(comparisons: list[Comparison], names: list[str], machine: dict[str, Any], file: str) -> None:
    """Draw the speed of each candidate relative to ours, the cases in two columns of about equal height."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    groups = [(one, [name for name in names if one.timed(name)]) for one in comparisons if one.timed(OURS)]
    rows = [len(present) + 1.2 for _, present in groups]
    half = next((n for n in range(len(groups)) if sum(rows[:n]) >= sum(rows) / 2 - 1), len(groups))
    columns = [groups] if len(groups) < 4 else [groups[:half], groups[half:]]
    height = max(sum(len(present) + 1.2 for _, present in column) for column in columns)
    slowest_to_fastest = [1 / one.ratio(name).median for one, present in groups for name in present if name != OURS]
    figure, panels = pyplot.subplots(
        1, len(columns), figsize=(6.6 * len(columns), 0.155 * height + 1.5), squeeze=False, layout="constrained"
    )
    for axes, column in zip(panels[0], columns, strict=True):
        end = 0.0
        for comparison, present in column:
            end = draw_group(axes, comparison, present, end) + 1.2
        axes.axvline(1, color=CANDIDATES[OURS].colour, linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
        axes.set_ylim(height - 0.6, -1.0)
        axes.set_xlim(0, 1.24 * max([1, *slowest_to_fastest]))
        axes.set_yticks([])
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(labelsize=8)
        axes.set_xlabel("speed relative to attentile (longer is faster)", fontsize=8.5)
    used = [name for name in names if any(name in present for _, present in groups)]
    handles = [Patch(color=CANDIDATES[name].colour, label=CANDIDATES[name].title) for name in used]
    figure.legend(handles=handles, loc="outside upper center", ncols=2 * len(columns), frameon=False, fontsize=8.5)
    figure.supxlabel(
        f"{machine['processor']}, {machine['threads']} threads, {machine['date']}; "
        + ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version),
        fontsize=7,
        color="#666666",
    )
    figure.savefig(file, dpi=160)
    pyplot.close(figure)


# --- command line ---------------------------------------------------------------------------------------------------


def save(file: str, machine: dict[str, Any], comparisons: list[Comparison]) -> None:
    """Write everything that was measured as JSON."""
    results = {}
    for one in comparisons:
        results[one.case.name] = {
            "case": vars(one.case),
            "candidates": {
                name: vars(measurement)
                | ({"milliseconds": measurement.median * 1e3, "gflops": one.gflops(name)} if one.timed(name) else {})
                for name, measurement in one.measurements.items()
            },
            "ratios": {name: vars(one.ratio(name)) for name in one.measurements if one.ratio(name) and name != OURS},
            "best_peer": one.best_peer(),
        }
    Path(file).write_text(json.dumps({"machine": machine, "cases": results}, indent=1) + "\n")


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked before anything is started."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=len(available_cpus()), help="default: the CPUs there are")
    parser.add_argument("--cases", help=f"of {', '.join(case.name for case in CASES)}; default: all")
    parser.add_argument("--with", dest="names", default=",".join(CANDIDATES), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each candidate; default: %(default)s")
    parser.add_argument("--ms", type=float, default=60, help="milliseconds of a turn; default: %(default)s")
    parser.add_argument("--json", metavar="FILE", help="write all measurements")
    parser.add_argument("--plot", metavar="FILE", help="draw the speeds, as .svg or .png; needs matplotlib")
    options = parser.parse_args(arguments)
    options.names = [name.strip() for name in options.names.split(",")]
    unknown = [name for name in options.names if name not in CANDIDATES]
    if unknown:
        parser.error(f"--with: no candidate named {', '.join(unknown)}; there are {', '.join(CANDIDATES)}")
    try:
        options.cases = find_cases(options.cases)
    except ValueError as error:
        parser.error(f"--cases: {error}")
    if not 1 <= options.threads <= len(available_cpus()):
        parser.error(f"--threads: {options.threads} is not 1 … {len(available_cpus())}, the CPUs this process may use")
    if options.rounds < 1:
        parser.error("--rounds: at least one is needed")
    if options.plot and not options.plot.endswith((".svg", ".png")):
        parser.error(f"--plot: {options.plot} ends neither in .svg nor in .png")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib, or leave the option out")
    return options


def main() -> int:
    """Measure, print, and write what was asked for; 1 if attentile is absent, failed or gave a wrong result."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # in an orderly way, for stopped processes do not notice
    options = parse_options()
    machine = describe_machine(options.threads, options.names)
    print_machine(machine)
    confine(options.threads)
    print("\nmilliseconds per call; ratio = time of the best peer / ours, median and extremes of paired rounds")
    columns = "".join(f"{name:>10}" for name in options.names)
    print(f"{'case':<12}{columns}{'GFLOP/s':>10}{'best peer':>11}{'ratio':>8}   low – high", flush=True)
    comparisons = []
    for case in options.cases:
        comparisons.append(compare(case, options.names, options))
        print(table_row(comparisons[-1], options.names), flush=True)
    if OURS in options.names and len(options.names) > 1:
        print("\ntime of each peer / ours (above 1: ours is faster)")
        print(ratio_table(comparisons, options.names))
    details = {name: one.details for run in comparisons for name, one in run.measurements.items() if one.details}
    machine["details"] = details
    print()
    for line in [*(f"{name}: {text}" for name, text in details.items()), *notes(comparisons)]:
        print(line)
    if options.json:
        save(options.json, machine, comparisons)
    if options.plot and any(one.timed(OURS) for one in comparisons):
        plot(comparisons, options.names, machine, options.plot)
    elif options.plot:
        print(f"{options.plot} not drawn: attentile was not timed")
    ours = {run.measurements[OURS].status for run in comparisons if OURS in run.measurements}
    return int(not ours <= {"ready", "unsupported"})


if __name__ == "__main__":
    sys.exit(main())
