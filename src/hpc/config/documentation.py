"""What the keys of the config mean, from the comments beside them in sections.py: `--help KEY`, and the reference page.

python -m hpc.config.documentation    the part `Keys` of docs/reference.md
"""

import inspect
import json
import re
import textwrap
from dataclasses import dataclass

from hpc.config import defaults
from hpc.config.errors import ConfigError, join_key, suggest_key
from hpc.config.sections import SECTIONS, Config, key_fields

FIELD = re.compile(r"    (\w+): [^=#]+?(?: = .*?)?(?:  # (?!type:)(.*?))?(?:  # type: .*)?")
SCHEMAS = {"": Config, **SECTIONS}


@dataclass(frozen=True)
class KeyHelp:
    """A key of the config: its type and default as text, and its comment."""

    key: str
    type: str
    default: str
    comment: str


def describe(word: str) -> str:
    """Return the help of a key or a section, such as "cluster.chain", "cluster", "seed" or "seed=1".

    Of a key below `model`, `data` and the like, which the class there explains, it is that of the section.

    Raises:
        ConfigError: there is no such key.
    """
    key = word.lstrip("+~").partition("=")[0]
    keys = {entry.key: entry for name in SCHEMAS for entry in read_keys(name)}
    if key in SECTIONS:
        entries = [entry for entry in keys.values() if entry.key.startswith(f"{key}.")]
        return "\n\n".join([f"{key}: {inspect.getdoc(SCHEMAS[key])}", *map(_as_text, entries)])
    parent = key.partition(".")[0]
    if key not in keys and not (parent in keys and keys[parent].type == "Any"):
        fix = suggest_key(key, [*keys, *SECTIONS])
        raise ConfigError(f"--help {key}", None, "must name a key of the config", f"--help {fix.removesuffix('=...')}")
    return _as_text(keys.get(key) or keys[parent])


def read_keys(section: str) -> list[KeyHelp]:
    """Return the keys of a section, "" for those at the top of the config, with their comments."""
    schema = SCHEMAS[section]
    values = defaults.all_defaults()[section] if section else defaults.all_defaults()
    comments: dict[str, str] = {}
    above: list[str] = []
    for line in inspect.getsource(schema).splitlines():
        if line.startswith("    # "):
            above.append(line.removeprefix("    # "))
        elif match := FIELD.fullmatch(line):
            comments.setdefault(match[1], " ".join([*above, *filter(None, [match[2]])]))
            above = []
    return [
        KeyHelp(
            join_key(section, field.name),
            getattr(field.type, "__name__", str(field.type)) if "[" not in str(field.type) else str(field.type),
            json.dumps(values.get(field.name)),
            comments.get(field.name, ""),
        )
        for field in key_fields(schema)
    ]


def reference_page() -> str:
    """Return all keys as tables of Markdown."""
    parts = []
    for name, schema in SCHEMAS.items():
        title = f"`{name}`" if name else "At the top"
        first = (inspect.getdoc(schema) or "").partition("\n")[0]
        rows = [f"| `{e.key}` | `{e.default}` | {_in_table(e.comment)} |" for e in read_keys(name)]
        parts.append("\n".join([f"### {title}", "", first, "", "| key | default | meaning |", "|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def _as_text(entry: KeyHelp) -> str:
    meaning = textwrap.indent(textwrap.fill(entry.comment, 96), "    ")
    return "\n".join([f"{entry.key}={entry.default}  ({entry.type})", *filter(None, [meaning])])


def _in_table(text: str) -> str:
    return re.sub(r"(?<!`)(\$?\{[^}]*\})", r"`\1`", text.replace("|", "\\|"))


if __name__ == "__main__":
    print(reference_page(), end="")
