"""What `import attentile` costs beyond NumPy. Modules are counted instead of milliseconds, which a busy machine would
spoil: every module that is loaded for all must be known here, so an import that belongs inside a function shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

# What the package may load besides NumPy and itself: these, and what these load on some Python (annotationlib, ast and
# others come with dataclasses and inspect).
ALLOWED = {
    "__future__", "_weakrefset", "abc", "annotationlib", "ast", "collections", "contextlib", "contextvars", "copy",
    "copyreg", "dataclasses", "dis", "enum", "functools", "importlib", "inspect", "itertools", "keyword", "linecache",
    "math", "numbers", "opcode", "operator", "platform", "re", "reprlib", "threading", "token", "tokenize", "types",
    "typing", "weakref",
}  # fmt: skip
# What is among them by its first name only: importlib.metadata took 20 ms, for a version that only show_config() tells.
HEAVY = {"importlib.metadata", "importlib.resources"}


def output_of(code: str) -> str:
    """What the code prints, in a fresh Python without any setting of ours."""
    clean = {name: x for name, x in os.environ.items() if not name.startswith("ATTENTILE_")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


NEW_MODULES = """
import sys
import numpy as np
{before}
known = set(sys.modules)
{after}
print("\\n".join(sorted(name for name, module in sys.modules.items() if name not in known and module is not None)))
"""


def new_modules(after: str, before: str = "") -> set[str]:
    """Names of the modules that `after` loads into a fresh Python with NumPy, those of the package left out."""
    names = output_of(NEW_MODULES.format(before=before, after=after)).split()
    return {name for name in names if name.partition(".")[0] != "attentile"}


def is_allowed(name: str) -> bool:
    """Known, or a module without a file in which Cython keeps its types."""
    root = name.partition(".")[0]
    if name in HEAVY:
        return False
    return root in ALLOWED or root == "numpy" or root.startswith(("_cython_", "cython_"))


# The one package that is asked for where it is installed; what it costs is its own.
THREADPOOLCTL = """
try:
    import threadpoolctl
except ImportError:
    pass
"""


def test_import_loads_what_is_known_and_nothing_heavy():
    surprising = [name for name in new_modules("import attentile", before=THREADPOOLCTL) if not is_allowed(name)]
    assert not surprising


@pytest.mark.parametrize("found", ["None", "types.ModuleType('threadpoolctl')"], ids=["none", "too old"])
def test_import_without_threadpoolctl(found):
    code = f"import sys, types; sys.modules['threadpoolctl'] = {found}; import attentile; print(attentile.KVCache)"
    assert "KVCache" in output_of(code)


@pytest.mark.parametrize("module", ["json", "importlib.metadata", "argparse", "pathlib"])
def test_the_check_sees_a_heavy_module(module):
    if module in new_modules("import " + module):  # else NumPy has loaded it: free for us
        assert not is_allowed(module)
    else:
        assert module in output_of("import sys, numpy; print('\\n'.join(sys.modules))").split()


FIRST_CALLS = {
    "plain": "attentile.attention(q, q, q, num_threads=1)",
    "general": "attentile.attention(q, q, q, mask=q[0, 0] @ q[0, 0].T > 0, causal=True, return_lse=True)",
    "layer": "w = np.eye(4); attentile.MultiHeadAttention(w, w, w, w, num_heads=2)(q[:, 0])",
    "cache": "c = attentile.KVCache(1, 2, 4); c.append(q, q); c.attend(q)",
    "statistics": "attentile.attention_stats(q, q, q)",
}


@pytest.mark.parametrize("call", FIRST_CALLS)
def test_the_first_call_loads_nothing(call):
    # The number of threads is looked for once, in files of the system.
    before = "import attentile; attentile.set_num_threads(1)"
    assert new_modules("q = np.ones((1, 2, 8, 4)); " + FIRST_CALLS[call], before) == set()


def test_what_is_loaded_late_works():
    """Each import inside a function is run, in a process that has nothing of it loaded."""
    code = """
import io, json
import numpy as np
import attentile
cache = attentile.KVCache(1, 1, 4, capacity=4)
cache.append(np.ones((1, 1, 2, 4)), np.ones((1, 1, 2, 4)))
file = io.BytesIO()
cache.save(file)
file.seek(0)
arrays = {name + "_proj.weight": np.eye(4) for name in "qkvo"}
assert attentile.MultiHeadAttention.from_arrays(arrays, num_heads=2).num_heads == 2
print(json.dumps([attentile.KVCache.load(file).lengths.tolist(), attentile.show_config(as_dict=True)["python"]]))
"""
    assert json.loads(output_of(code)) == [[2], sys.version.split()[0]]
