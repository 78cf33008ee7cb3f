"""Reports about what a wheel needs to be imported: instruction sets, and the runtimes that it links."""

from __future__ import annotations

import bisect
import ctypes.util
import itertools
import json
import platform
import re
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
from conftest import FMA_ISAS, HERE, ISAS
from numpy.testing import assert_allclose, assert_array_equal
from report_helpers import check, output_of, qkv, run_python

from attentile import attention, use_backend
from attentile.runtime import backend

# ---- B69: instruction sets ----

SMALL_CALL = """
import json
import numpy as np
import attentile

q, k, v = (np.random.default_rng(x).standard_normal((1, 2, 33, 16)).astype(np.float32) for x in range(3))
out = attentile.attention(q, k, v, causal=True)
print(json.dumps([attentile.show_config(as_dict=True)["isa"], out.ravel().tolist()]))
"""


def test_b69_every_instruction_set_can_be_forced(compiled):
    """From the environment, in a process that never runs another; all agree with the NumPy code."""
    q, k, v = (np.random.default_rng(x).standard_normal((1, 2, 33, 16)).astype(np.float32) for x in range(3))
    expected = check(q, k, v, causal=True).out
    assert "generic" in HERE
    for isa in HERE:
        running, out = json.loads(output_of(SMALL_CALL, ATTENTILE_ISA=isa))
        assert running == isa
        assert_allclose(np.reshape(out, expected.shape), expected, rtol=0, atol=2e-6)


def test_b69_instruction_sets_agree(compiled):
    q, k, v = qkv((2, 4, 100, 67), keys=300, kv_heads=2)
    mask = np.random.default_rng(69).random((100, 300)) < 0.7
    results = {}
    for isa in HERE:
        with use_backend("compiled", isa):
            results[isa] = attention(q, k, v, mask=mask)
    for a, b in itertools.combinations(results, 2):
        if a in FMA_ISAS and b in FMA_ISAS:
            assert_array_equal(results[a], results[b])
        else:
            assert_allclose(results[a], results[b], rtol=0, atol=2e-6)


def test_b69_instruction_set_that_is_not_there(compiled):
    """An error that lists what is there; never a crash at the first call, never a silent other choice."""
    for name in ("nonsense", *(isa for isa in ISAS if isa not in HERE)):
        done = run_python("import attentile", ATTENTILE_ISA=name)
        assert done.returncode == 1
        message = done.stderr.strip().splitlines()[-1]
        assert message.startswith("ImportError: attentile: ATTENTILE_ISA")
        assert repr(name) in message
        assert all(isa in message for isa in HERE)


BASELINE_FREE = ("avx2.c", "avx512.c")  # the objects that are entered only after the processor was asked


def functions_by_object(path: Path) -> list[tuple[int, str]]:
    """(address, source file) of the functions of an ELF file, in order; "" for those that several files see."""
    table = subprocess.run(["readelf", "-sW", path], capture_output=True, text=True, check=True).stdout
    found, source = set(), ""
    for line in table.splitlines():
        fields = line.split()
        if len(fields) >= 7 and fields[3] == "FILE":
            source = fields[7] if len(fields) > 7 else ""
        elif len(fields) >= 8 and fields[3] == "FUNC" and fields[6] != "UND":
            found.add((int(fields[1], 16), source if fields[4] == "LOCAL" else ""))
    return sorted(found)


def objects_with_vex(path: Path) -> set[str]:
    """The source files whose code has instructions of AVX or later: by their names, which start with v."""
    starts = functions_by_object(path)
    addresses = [address for address, _ in starts]
    code = subprocess.run(["objdump", "-d", "--no-show-raw-insn", path], capture_output=True, text=True, check=True)
    lines = re.finditer(r"^ *([0-9a-f]+):\s+v(?!er[rw]|m[cxlrs])\w+ ", code.stdout, re.MULTILINE)
    return {starts[bisect.bisect(addresses, int(line[1], 16)) - 1][1] for line in lines}


def test_b69_only_the_dispatched_objects_need_avx(compiled):
    """Import, the pool and the baseline must run on any processor of the platform."""
    core = Path(backend.active.__file__)
    if platform.machine() not in ("x86_64", "AMD64") or core.suffix != ".so":
        pytest.skip("a question of x86-64")
    if not (shutil.which("objdump") and shutil.which("readelf")):
        pytest.skip("no objdump and readelf here")
    sources = {source for _, source in functions_by_object(core)}
    if not {"_core.c", "pool.c", "generic.c", *BASELINE_FREE} <= sources:
        pytest.skip("the names of the objects were stripped")
    assert objects_with_vex(core) == set(BASELINE_FREE)


# ---- B70, B71: no runtime of OpenMP ----

OPENMP_RUNTIME = re.compile(r"gomp|iomp|libomp|vcomp", re.IGNORECASE)


def needed_libraries(path: Path) -> list[str]:
    """Names of the shared libraries (DT_NEEDED) of a 64-bit little-endian ELF file; skips the test for other files."""
    data = path.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        pytest.skip(f"{path.name} is no 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", data, 32)
    entry_size, entries = struct.unpack_from("<HH", data, 54)
    headers = [struct.unpack_from("<IIQQQQ", data, table + i * entry_size) for i in range(entries)]
    segments = [(address, offset, size) for kind, _, offset, address, _, size in headers if kind == 1]
    tags = []
    for kind, _, offset, _, _, size in headers:
        if kind == 2:  # PT_DYNAMIC: pairs (tag, value)
            tags += struct.iter_unpack("<qQ", data[offset : offset + size])
    (strings,) = (value for tag, value in tags if tag == 5)
    (start,) = (strings - address + offset for address, offset, size in segments if address <= strings < address + size)
    return [data[start + name : data.index(b"\0", start + name)].decode() for tag, name in tags if tag == 1]


def test_b70_the_core_links_no_openmp(compiled):
    libraries = needed_libraries(Path(backend.active.__file__))
    assert any(name.startswith(("libc.", "libpthread.")) for name in libraries)  # the list was found
    assert not [name for name in libraries if OPENMP_RUNTIME.search(name)]


OPENMP_REQUEST = re.compile(r"[-/]f?openmp\b|pragma omp|omp\.h|\bprange\b|cython\.parallel", re.IGNORECASE)


def test_b70_no_source_asks_for_openmp():
    """What no file asks for is missing in no wheel, whatever the platform."""
    root = Path(__file__).parents[2]
    if not (root / "setup.py").exists():
        pytest.skip("the sources are not beside the tests")
    core = root / "src" / "attentile" / "core"
    files = [root / "setup.py", *(p for e in ("*.pyx", "*.px[di]", "kernels/*.[ch]") for p in core.glob(e))]
    files += core.glob("kernels/*.inc")
    assert len(files) >= 15
    code = {path.name: path.read_text(encoding="utf-8") for path in files}
    assert not {name: OPENMP_REQUEST.findall(text) for name, text in code.items() if OPENMP_REQUEST.search(text)}


@pytest.mark.parametrize("line", ['extra = ["-fopenmp"]', "#pragma omp parallel", "from cython.parallel import prange"])
def test_b70_the_check_of_sources_knows_the_requests(line):
    assert OPENMP_REQUEST.search(line)


@pytest.mark.parametrize("name", ["libgomp-24e2ab19.so.1.0.0", "libiomp5.so", "libomp.dylib", "VCOMP140.DLL"])
def test_b70_the_check_knows_the_runtimes(name):
    assert OPENMP_RUNTIME.search(name)


LOADED_RUNTIMES = """
import json
import numpy as np
import threadpoolctl

def runtimes():
    pools = threadpoolctl.threadpool_info()
    return sorted((x["user_api"], x["filepath"]) for x in pools if x["user_api"] != "attentile")

before = runtimes()
import attentile
q = np.ones((1, 4, 512, 64), np.float32)
for threads in (1, 2):
    attentile.attention(q, q, q, num_threads=threads)
print(json.dumps([before, runtimes()]))
"""


def test_b71_no_runtime_is_loaded(compiled):
    pytest.importorskip("threadpoolctl")
    before, after = json.loads(output_of(LOADED_RUNTIMES))
    assert after == before


# Runs a parallel region of somebody else's OpenMP and calls of ours, in turns and in both orders of loading.
BESIDE_OPENMP = """
import ctypes, sys
import numpy as np

def load_openmp():
    gomp = ctypes.CDLL(sys.argv[1])
    region = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

    def run_region():
        seen = []
        gomp.GOMP_parallel(region(lambda _: seen.append(1)), None, 4, 0)
        assert len(seen) == 4

    run_region()
    return run_region

if sys.argv[2] == "openmp first":
    run_region = load_openmp()
    import attentile
else:
    import attentile
    attentile.attention(*np.ones((3, 1, 4, 512, 64), np.float32), num_threads=2)
    run_region = load_openmp()

rng = np.random.default_rng(71)
q, k, v = (rng.standard_normal((1, 4, 512, 64)).astype(np.float32) for _ in range(3))
expected = attentile.attention(q, k, v, num_threads=1)
for threads in (1, 2, 4) * 5:
    assert np.array_equal(attentile.attention(q, k, v, num_threads=threads), expected)
    run_region()
print("done")
"""


@pytest.mark.parametrize("order", ["openmp first", "attentile first"])
def test_b71_beside_another_openmp_runtime(compiled, order):
    library = ctypes.util.find_library("gomp")
    if library is None:
        pytest.skip("no libgomp here to run beside")
    assert output_of(BESIDE_OPENMP, library, order) == "done"
