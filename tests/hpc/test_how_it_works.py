"""Check docs/how-it-works.md against the tree: rooms, files of mechanisms, and how many lines they take."""

import re
import tomllib
from collections import Counter

from fork import REPO

PAGE = (REPO / "docs" / "how-it-works.md").read_text(encoding="utf-8")
HPC, PROJECT = REPO / "src" / "hpc", REPO / "{{cookiecutter.project_slug}}"
SUFFIXES = (".py", ".bash", ".yaml", ".js", ".css")
MAX_OF_A_ROOM, MAX_OF_ALL = 8, 120
# - **name** (`file`, `file`): purpose. Without it: loss.
LINE = re.compile(r"- \*\*[^*]+\*\* \((?P<files>`[^`]+`(?:, `[^`]+`)*)\): .+\. Without it: .+\.")


def section(title: str) -> str:
    """Return the text below a heading of the second level."""
    return re.split(r"(?m)^## ", PAGE.split(f"\n## {title}\n")[1])[0]


def lines_of_rooms() -> dict[str, list[str]]:
    """Return the lines on mechanisms by room, each without its line breaks."""
    rooms = {}
    for part in re.split(r"(?m)^### ", section("Every mechanism"))[1:]:
        heading, _, text = part.partition("\n")
        bullets = re.findall(r"(?ms)^- .*?(?=^- |^$|\Z)", text)
        rooms[heading.strip("/")] = [" ".join(bullet.split()) for bullet in bullets]
    return rooms


def named_files() -> list[str]:
    """Return the files that the lines name, relative to src/hpc."""
    return [
        f"{room}/{name}" if (HPC / room).is_dir() else name
        for room, lines in lines_of_rooms().items()
        for line in lines
        if (match := LINE.fullmatch(line))
        for name in re.findall("`([^`]+)`", match["files"])
    ]


def test_each_line_has_a_name_files_a_purpose_and_a_loss() -> None:
    others = [line for lines in lines_of_rooms().values() for line in lines if not LINE.fullmatch(line)]
    assert not others, "- **name** (`file`, `file`): what it is for. Without it: what would be lost."


def test_rooms_are_those_of_import_linter_in_its_order() -> None:
    contracts = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    picture = re.search(r"```text\n(.*?)```", section("The rooms"), re.DOTALL)
    assert picture, "the picture of the rooms is a block of text"
    assert [line.split()[0] for line in picture[1].splitlines()] == layers
    assert lines_of_rooms().keys() == set(layers)


def test_each_file_belongs_to_exactly_one_line() -> None:
    counts = Counter(named_files())
    assert not {name: count for name, count in counts.items() if count > 1}, "on several lines"
    files = {str(path.relative_to(HPC)) for path in HPC.rglob("*") if path.suffix in SUFFIXES}
    assert not {name for name in files - counts.keys() if not name.endswith("__init__.py")}, "on no line"
    assert not counts.keys() - files, "on a line, and not in the tree"


def test_every_path_in_the_text_exists() -> None:
    paths = {path for path in re.findall(r"`([\w./-]+/[\w.-]+)`", PAGE) if path.endswith(SUFFIXES)}
    assert len(paths) > 30
    assert not {path for path in paths if not any((folder / path).exists() for folder in (HPC, REPO, PROJECT))}


def test_there_are_few_enough_mechanisms() -> None:
    numbers = {room: len(lines) for room, lines in lines_of_rooms().items()}
    assert not {room: number for room, number in numbers.items() if not 1 <= number <= MAX_OF_A_ROOM}
    assert sum(numbers.values()) <= MAX_OF_ALL
