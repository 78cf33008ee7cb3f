"""Sphinx configuration. `.ci/docs` builds the site; nothing on it is loaded from the net."""

import sys
from importlib import metadata
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS))

from sitegen.build import generate  # noqa: E402

project = "attentile"
author = "the attentile developers"
copyright = f"2026, {author}"
try:
    release = metadata.version("attentile")
except metadata.PackageNotFoundError:  # built from a source tree
    release = "development"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "_generated", "data/README.md", "requirements.txt"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

# Docstrings name arguments and functions in single backticks: a link where there is something to link to, code
# elsewhere. What pages name in a role must be there, except types, which docstrings write as prose ("array_like").
default_role = "py:obj"
highlight_language = "none"  # their literal blocks are drawings and formulas
nitpicky = True
nitpick_ignore_regex = [("py:obj", r".*"), ("py:class", r"(?!attentile\.).*"), ("py:exc", r"(?!attentile\.).*")]
napoleon_google_docstring = False
napoleon_use_param = False  # types are prose: a link from "path" would lead anywhere; arguments told together stay so
napoleon_custom_sections = [("Attributes", "params_style")]
napoleon_use_rtype = False
autodoc_typehints = "none"  # the docstrings tell shapes and dtypes, which annotations cannot
autodoc_member_order = "bysource"
maximum_signature_line_length = 88
python_use_unqualified_type_names = True
add_module_names = False

smartquotes = False  # docstrings quote code
html_theme = "furo"
pygments_dark_style = "github-dark"  # the default underlines modules as if they were links
html_title = "attentile"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = True

generate(DOCS, DOCS / "_generated")
