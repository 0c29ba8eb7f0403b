"""Check docs/promises.md: its quotes stand on the pages in that order, its tests exist, and no section is left out."""

import re
from pathlib import Path

import pytest
from fork import REPO

TEXT = (REPO / "docs" / "promises.md").read_text(encoding="utf-8")
PAGES = ["README.md", "docs/reference.md", "docs/bring-your-own.md", "{{cookiecutter.project_slug}}/README.md"]
ROW = re.compile(r"\| (?P<quote>.+?) \| (?P<tests>`[\w/.:]+`(?:, `[\w/.:]+`)?) \|")
# Headings under which nothing is promised.
WITHOUT: set[tuple[str, str]] = set()


def normalize(text: str) -> str:
    """Return the text with one space for each run of spaces and line breaks."""
    return " ".join(text.split())


def rows(page: str) -> list[tuple[str, list[str]]]:
    """Return the promises of a page, each with its tests."""
    _, _, part = TEXT.partition(f"\n## {page}\n\n| promise | decided by |\n|---|---|\n")
    lines = re.split(r"(?m)^## ", part)[0].strip().splitlines()
    found = [ROW.fullmatch(line) for line in lines]
    assert all(found), [line for line, match in zip(lines, found, strict=True) if not match]
    return [(match["quote"], re.findall("`(.+?)`", match["tests"])) for match in found if match]


def sections(page: str) -> dict[str, str]:
    """Return the text below each heading of the second level; "" is what stands above the first one."""
    parts = re.split(r"(?m)^## (.+)$", read(page))
    return {"": normalize(parts[0])} | {
        name: normalize(part) for name, part in zip(parts[1::2], parts[2::2], strict=True)
    }


def read(page: str) -> str:
    return (REPO / page).read_text(encoding="utf-8")


def has_test(place: str) -> bool:
    file, _, name = place.partition("::")
    return Path(REPO, file).is_file() and f"def {name}(" in read(file)


def test_it_has_the_pages_in_their_order() -> None:
    assert re.findall(r"(?m)^## (.+)$", TEXT) == PAGES


@pytest.mark.parametrize("page", PAGES)
def test_each_quote_is_on_its_page_and_after_the_one_before(page: str) -> None:
    text, place = normalize(read(page)), 0
    for quote, _ in rows(page):
        assert 5 <= len(quote.split()) <= 25, quote
        assert quote in text, f"not on the page: {quote}"
        place = text.find(quote, place)
        assert place >= 0, f"not after the one before: {quote}"


@pytest.mark.parametrize("page", PAGES)
def test_each_test_that_is_named_exists(page: str) -> None:
    assert not {place for _, places in rows(page) for place in places if not has_test(place)}


@pytest.mark.parametrize("page", PAGES)
def test_each_section_has_a_promise_unless_it_makes_none(page: str) -> None:
    quotes = [quote for quote, _ in rows(page)]
    empty = {name for name, text in sections(page).items() if not any(quote in text for quote in quotes)}
    assert empty == {name for of, name in WITHOUT if of == page}
