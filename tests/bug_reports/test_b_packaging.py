"""Reports about what a wheel needs to be imported: instruction sets, and the runtimes that it links."""

from __future__ import annotations

import ctypes.util
import itertools
import json
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from conftest import FMA_ISAS, ISAS, available_isas
from numpy.testing import assert_allclose, assert_array_equal
from report_helpers import check, output_of, qkv, run_python

from attentile import attention, config, use_backend

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
    assert "generic" in available_isas()
    for isa in available_isas():
        running, out = json.loads(output_of(SMALL_CALL, ATTENTILE_ISA=isa))
        assert running == isa
        assert_allclose(np.reshape(out, expected.shape), expected, rtol=0, atol=2e-6)


def test_b69_instruction_sets_agree(compiled):
    q, k, v = qkv((2, 4, 100, 67), keys=300, kv_heads=2)
    mask = np.random.default_rng(69).random((100, 300)) < 0.7
    results = {}
    for isa in available_isas():
        with use_backend("compiled", isa):
            results[isa] = attention(q, k, v, mask=mask)
    for a, b in itertools.combinations(results, 2):
        if a in FMA_ISAS and b in FMA_ISAS:
            assert_array_equal(results[a], results[b])
        else:
            assert_allclose(results[a], results[b], rtol=0, atol=2e-6)


def test_b69_instruction_set_that_is_not_there(compiled):
    """An error that lists what is there; never a crash at the first call, never a silent other choice."""
    here = available_isas()
    for name in ("nonsense", *(isa for isa in ISAS if isa not in here)):
        done = run_python("import attentile", ATTENTILE_ISA=name)
        assert done.returncode == 1
        message = done.stderr.strip().splitlines()[-1]
        assert message.startswith("ImportError: attentile: ATTENTILE_ISA")
        assert repr(name) in message
        assert all(isa in message for isa in here)


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
    libraries = needed_libraries(Path(config.core().__file__))
    assert any(name.startswith(("libc.", "libpthread.")) for name in libraries)  # the list was found
    assert not [name for name in libraries if OPENMP_RUNTIME.search(name)]


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
