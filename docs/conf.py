"""Sphinx's settings for the site that `make docs` builds: docs/, the pages beside it, and the API from docstrings.

The source folder is the root of the repository, so that a relative link between .md files is a link between pages here
as it is in a viewer of repositories. The lists of docs/index.md are the site's navigation: a page gets its place there.
Everything is read from disk; the build needs no network.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import bagua  # noqa: E402

project = "Bagua"
author = copyright = "The Bagua developers"
version = release = bagua.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = ["docs/**", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md", "benchmarks/results/*.md"]
# Sphinx walks every folder that is not excluded, .venv and build too.
exclude_patterns = [p.name for p in ROOT.iterdir() if p.is_dir() and p.name not in ("benchmarks", "docs")]

myst_heading_anchors = 4  # the anchors that a viewer of repositories makes, which links use
suppress_warnings = ["myst.header"]  # the reports of benchmarks have no second level

highlight_language = "none"  # of a block that names none
default_role = "code"  # `name` in a docstring is code, as ``name`` is
autodoc_member_order = "bysource"
# Importing them takes longer than the rest.
autodoc_mock_imports = ["accelerate", "lightning", "nvflare", "ray", "transformers"]
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

html_theme = "furo"
pygments_style = "friendly"
pygments_dark_style = "monokai"
html_title = f"Bagua {release}"
html_copy_source = False
html_show_sphinx = False
html_static_path = ["static"]
html_css_files = ["site.css"]
templates_path = ["templates"]
html_additional_pages = {"index": "to_start.html"}  # the start page is docs/index.html

PAGE = re.compile(r"^- \[([^\]]+)\]\(([^)#]+)\.(?:md|rst)\)", re.MULTILINE)
NOT_SEARCHED = ("CHANGELOG", "benchmarks/")  # they mention everything and answer nothing


def with_toctrees(start_page):
    """Returns the text of docs/index.md with a hidden toctree for each of its sections that lists pages."""
    toctrees = []
    for section in re.split(r"^## ", start_page, flags=re.MULTILINE)[1:]:
        entries = [f"{title} <{page}>" for title, page in PAGE.findall(section)]
        if entries:
            head = ["```{toctree}", ":hidden:", f":caption: {section.splitlines()[0]}", ""]
            toctrees.append("\n".join([*head, *entries, "```"]))
    return "\n\n".join([start_page, *toctrees]) + "\n"


def on_source_read(app, docname, source):
    """Adds the toctrees of the start page, and leaves pages of figures out of navigation and search."""
    if docname == root_doc:
        source[0] = with_toctrees(source[0])
    if docname.startswith(NOT_SEARCHED):
        orphan = "" if docname == "CHANGELOG" else "orphan: true\n"
        source[0] = f"---\n{orphan}nosearch: true\n---\n{source[0]}"


def setup(app):
    """Connects the hook above."""
    app.connect("source-read", on_source_read)
