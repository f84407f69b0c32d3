"""What Sphinx is told beside docs/conf.py: pages that are plain Markdown get what is made of the
source.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.documents.following import ROOT
from scripts.documents.settings import filled

CONTENTS = ROOT / "docs" / "README.md"
REFERENCE = "<!-- reference -->"


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", fill)
    app.connect("autodoc-process-docstring", as_literal_blocks)
    app.connect("build-finished", front_page)
    return {"parallel_read_safe": True}


def fill(app: Any, page: str, source: list[str]) -> None:
    """Put what is generated where a page has a comment for it, and the contents below the front
    page.
    """
    text = filled(source[0]).replace(REFERENCE, reference())
    if page == app.config.root_doc:
        text += "\n\n" + "\n".join(contents())
    source[0] = text


def contents() -> Iterator[str]:
    """The sections of docs/README.md as tables of contents for the margin."""
    yield from ("```{toctree}", ":hidden:", "Contents <docs/README>", "```")
    for section in re.split(r"^## ", CONTENTS.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        pages = re.findall(r"^- \[(.+?)\]\(([\w./]+)\.md\)", section, re.MULTILINE)
        yield from ("```{toctree}", ":hidden:", f":caption: {section.splitlines()[0]}")
        yield from (
            f"{title} <{Path('docs', page).as_posix().replace('docs/../', '')}>"
            for title, page in pages
        )
        yield "```"


def reference() -> str:
    """Every public name of expt, from its docstring."""
    import expt

    lines = ["```{eval-rst}"]
    for name in sorted(
        set(expt.__all__) - {"__version__"}, key=lambda name: (name[0].isupper(), name)
    ):
        if name[0].isupper():
            lines += [f".. autoclass:: expt.{name}", "   :members:", ""]
        else:
            lines += [f".. autofunction:: expt.{name}", ""]
    return "\n".join([*lines, "```"])


def as_literal_blocks(
    app: Any, what: str, name: str, thing: object, options: object, lines: list[str]
) -> None:
    """What a docstring indents is code."""
    found: list[str] = []
    inside = False
    for line in lines:
        indented = line.startswith("    ")
        if indented and not inside:
            found += ["::", ""]
        inside = indented or (inside and not line.strip())
        found.append(line)
    lines[:] = found


def front_page(app: Any, error: Exception | None) -> None:
    """README.html is what a browser finds in the folder."""
    if error is None and app.builder.format == "html":
        shutil.copy(Path(app.outdir, f"{app.config.root_doc}.html"), Path(app.outdir, "index.html"))
