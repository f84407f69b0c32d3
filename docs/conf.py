"""Sphinx's settings: README.md is the front page, docs/README.md the table of contents; see
scripts/docs.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import expt
from scripts.documents.site import setup  # noqa: F401

project = html_title = "expt"
version = release = expt.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
root_doc = "README"
include_patterns = [
    "README.md",
    "docs/*.md",
    "BENCHMARKS.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "expt/data/*.md",
]
exclude_patterns = ["build", "outputs", "tests", ".*"]

html_theme = "furo"
html_theme_options = {"top_of_page_buttons": []}
html_show_sourcelink = html_show_copyright = html_show_sphinx = False
copybutton_prompt_text = "$ "
myst_heading_anchors = 4
default_role = "code"  # of the docstrings' backticks
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
