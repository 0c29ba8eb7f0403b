"""Sentences about damaged parts of files that a report shows."""


def damage_note(file: str, count: int, part: str) -> str:
    """Return e.g. "n1.csv has 2 damaged lines, which are left out" for a part such as "line"."""
    return f"{file} has {count} damaged {part}{'s, which are' if count > 1 else ', which is'} left out"
