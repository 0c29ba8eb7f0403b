"""Text that a command writes between two marks of a Markdown page."""

from pathlib import Path


def put(text: str, file: Path, *, name: str) -> None:
    """Replace the text between the two marks of this name in a file.

    Raises:
        ValueError: the file has no such marks.
    """
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, _, rest = file.read_text(encoding="utf-8").partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"{file} has no {begin} and {end}")
    file.write_text(f"{before}{begin}\n{text}{end}{after}", encoding="utf-8")
