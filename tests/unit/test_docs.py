"""Links between the README, the docs and the code lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
CODE = [*sorted((ROOT / "src").rglob("*.py")), *sorted((ROOT / "examples").glob("*.py"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_of_a_page_resolve(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s#]+)(?:#[^)]*)?\)", page.read_text())
    local = [link for link in links if "://" not in link and not link.startswith("mailto:")]
    assert [link for link in local if not (page.parent / link).exists()] == []


def test_pages_that_code_and_docs_name_exist() -> None:
    named = {
        (path.relative_to(ROOT).as_posix(), name)
        for path in [*PAGES, *CODE]
        for name in re.findall(r"(?<![\w/.-])docs/[\w./-]+\.(?:md|png)", path.read_text())
    }
    assert len(named) > 20
    assert sorted(pair for pair in named if not (ROOT / pair[1]).exists()) == []
