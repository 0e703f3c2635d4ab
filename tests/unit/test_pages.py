"""The pages of the repository: links lead to something."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"(?m)^#+ (.+)$")
_OTHERS = re.compile(r"\.|node_modules$|build$")  # folders that are not the repository's
_CODE = re.compile(r"(?ms)^```.*?^```")


def pages() -> list[str]:
    """All but those of what is installed, by their paths."""
    paths = (path.relative_to(ROOT) for path in ROOT.rglob("*.md"))
    return sorted(str(path) for path in paths if not any(_OTHERS.match(part) for part in path.parts))


@cache
def anchors(page: Path) -> frozenset[str]:
    """The names of its headings, as GitHub makes them: of headings that are alike the later ones have a number."""
    found: dict[str, int] = {}
    names = set()
    for heading in _HEADING.findall(_CODE.sub("", page.read_text("utf-8"))):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        name = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
        count = found[name] = found.get(name, -1) + 1
        names.add(f"{name}-{count}" if count else name)
    return frozenset(names)


def leads_somewhere(page: Path, link: str) -> bool:
    """Return whether there is the file, and the heading in it, that a link of a page names; others' pages count."""
    if re.match(r"[a-z]+:", link):
        return True
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    return target.exists() and (not anchor or target.suffix != ".md" or anchor in anchors(target))


@pytest.mark.parametrize("page", pages())
def test_links_lead_to_a_file_and_a_heading(page: str) -> None:
    text = _CODE.sub("", (ROOT / page).read_text("utf-8"))
    assert [link for link in _LINK.findall(text) if not leads_somewhere(ROOT / page, link)] == []


def test_a_heading_or_a_file_that_is_not_there_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One `word`, twice\n\n## Twice\n\n## Twice\n\n```\n# none\n```\n", "utf-8")
    there = ["#one-word-twice", "#twice-1", "page.md#twice", "https://example.org/#x", "page.md"]
    assert all(leads_somewhere(page, link) for link in there)
    assert not any(leads_somewhere(page, link) for link in ("#twice-2", "#none", "other.md", "page.md#thrice"))
