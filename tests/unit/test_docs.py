"""Links between the README, the docs and the code lead somewhere."""

from __future__ import annotations

import re
import tokenize
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


POINTER = re.compile(r"(?<![\w/.*-])((?:[a-z_0-9]+/)*[a-z_0-9]+\.py)(?!\w)")
FOLDERS = [ROOT, ROOT / "src/holdfast"]


def words_of(path: Path) -> str:
    """What a module says to its readers: docstrings and comments."""
    lines = path.read_text().splitlines(keepends=True)
    tokens = tokenize.generate_tokens(iter(lines).__next__)
    return "\n".join(
        token.string
        for token in tokens
        if token.type == tokenize.COMMENT
        or (token.type == tokenize.STRING and token.string.lstrip("r").startswith('"""'))
    )


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_that_a_module_names_exist(path: Path) -> None:
    named = POINTER.findall(words_of(path))
    places = [path.parent, *FOLDERS]
    assert [name for name in named if not any((place / name).exists() for place in places)] == []


@pytest.mark.parametrize("page", PAGES[2:], ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_that_a_page_names_exist(page: Path) -> None:
    """With their folders; a name alone is of a module beside one that was named with its folder."""
    places = list(FOLDERS)
    for name in re.findall(r"`([a-z_0-9/]+\.py)`", page.read_text()):
        found = [place / name for place in places if (place / name).exists()]
        assert found, name
        places.append(found[0].parent)


def test_the_site_has_every_page_and_no_other() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    named = set(re.findall(r": ([\w-]+\.md)$", nav, re.MULTILINE))
    assert named == {page.name for page in (ROOT / "docs").glob("*.md")} | {"decisions.md"}
