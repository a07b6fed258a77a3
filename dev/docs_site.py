"""What `make docs` adds to the pages: a list of decisions, and links out of docs/ made to work.

A hook of MkDocs (mkdocs.yml). The pages stay plain Markdown that also reads well without a site.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
DECISIONS = ROOT / "docs/decisions"


def decisions_page() -> str:
    """Links to the decisions, by number, with their titles."""
    lines = ["# Decisions", "", "Why things are as they are, oldest first.", ""]
    for page in sorted(DECISIONS.glob("*.md")):
        title = page.read_text().splitlines()[0].removeprefix("# ")
        lines.append(f"- [{page.stem[:4]}: {title}](decisions/{page.name})")
    return "\n".join(lines) + "\n"


def on_files(files: Files, config: Any) -> Files:
    """Add the page of decisions."""
    files.append(File.generated(config, "decisions.md", content=decisions_page()))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Name files outside of docs/ instead of linking them: the site does not hold them."""
    here = (ROOT / "docs" / page.file.src_uri).parent

    def shown(link: re.Match[str]) -> str:
        text, target = link.groups()
        is_inside = (here / target.partition("#")[0]).resolve().is_relative_to(ROOT / "docs")
        return link.group() if is_inside else text

    return re.sub(r"\[([^\]]+)\]\((\.\./[^)\s]+)\)", shown, markdown)
