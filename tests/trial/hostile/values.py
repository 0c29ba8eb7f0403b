"""Hostile values. CANARY stands for the path of a file."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

ESCAPES = ["\x1b[31mred\x1b[0m", "\x1b]0;owned\x07", "\x9b31m", "\x08\x08", "\u202egnp.exe", "\u2066x", "\x7f", "a\rb"]
INJECTIONS = [
    "a[$(>CANARY)]",
    "${x:-$(>CANARY)}",
    "%(>CANARY)",
    "${oc.env:HOME,'$(>CANARY)'}",
    "}; >CANARY; {",
    "EOF\n>CANARY\nEOF",
    "$(>CANARY)",
    "`>CANARY`",
    "; >CANARY",
    "'; >CANARY; '",
    '"; >CANARY; "',
    "\n>CANARY\n",
    "x\n#SBATCH --uid=0",
    "$(>CANARY)x",
    "\\$(>CANARY)",
    "'$(>CANARY)'",
    "| >CANARY",
    "& >CANARY &",
    "!!python/object/apply:os.mkdir [CANARY]",
    "__import__('os').mkdir('CANARY')",
    "{0.__class__}",
    "{gpus.__class__}",
    "{gpus:>999999999}",
    "{",
    "}",
    "%n%s",
]
REFERENCES = [
    "${seed}",
    "${oc.env:HOME}",
    "${oc.env:NOPE}",
    "${oc.env:NOPE,x}",
    "${oc.create:'{a: 1}'}",
    "${name}",
    "${run_dir}",
    "${x",
    "${}",
    "${${seed}}",
    "${layout:__class__}",
    "${oc.decode:'[1,2'}",
    "${oc.dict.keys:trainer}",
    "${nope:1}",
    "???",
]
GRAMMAR = [  # the grammar of Hydra's overrides
    "choice(1,2)",
    "range(1,3)",
    "interval(0,1)",
    "glob(*)",
    "sort(3,1)",
    "shuffle(1,2)",
    "int('3')",
    "float(nan)",
    "str([1])",
    "bool(x)",
    "json_str({a:1})",
    "extend_list(1)",
    "tag(a,choice(1,2))",
    "{a:{b:[1,{c:2}]}}",
    "{a:1,}",
    "[1,,2]",
    "[",
    "{a",
    "'",
    "'a",
    '"a',
    "\\'",
    "a:b",
    "1,2",
    "a b",
    "${",
    "@x",
    ":",
    "1e",
    "\\,",
]
WORDS = [
    "",
    " ",
    "\t",
    "null",
    "~",
    "true",
    "yes",
    "no",
    "on",
    "0123",
    "0189",
    "1e5",
    "1_000",
    "0x1f",
    "1:30:00",
    "12.10",
    "None",
    "[]",
    "[1,2",
    "{a: 1}",
    "{}",
    "[[[[]]]]",
    "*a",
    "&a b",
    "- a",
    "a: b",
    "<b>",
    "<script>alert(1)</script>",
    "CON",
    "-rf",
    "--help",
    "@file",
    "=",
    "a=b",
    "a,b",
    "a b",
    "'",
    '"',
    "\\",
    "\\\\",
    "?",
    "*",
    "[a-z]",
    "%j",
    "é",
    "日本",
    "😀",
    "#",
    "://",
    "../../../../etc/passwd",
    "/etc/passwd",
    "~nobody/x",
    "file:///etc/passwd",
    "s3://b/x",
    "localhost:6000",
    "A" * 3000,
    "\udcff\udcfe",
    "/dev/zero",
    "/dev/full",
    "/proc/self/mem",
    ".",
    "..",
    "/",
    "a/b",
    "NAN",
    "os.system",
    "_target_",
]
NUMBERS = [
    "0",
    "-1",
    "1",
    "2",
    "3",
    "7",
    "1.5",
    "-0.0",
    "nan",
    ".nan",
    "inf",
    "-inf",
    "1e400",
    "1e-400",
    "9" * 30,
    "1e308",
    "65536",
]
TEXTS = [*ESCAPES, *INJECTIONS, *REFERENCES, *GRAMMAR, *WORDS, *NUMBERS]
DATA: list[Callable[[], Any]] = [
    lambda: None,
    lambda: True,
    lambda: False,
    lambda: 0,
    lambda: -1,
    lambda: 1,
    lambda: 10**30,
    lambda: -(10**30),
    lambda: 2**63,
    lambda: 1e308,
    lambda: float("nan"),
    lambda: float("inf"),
    lambda: -0.0,
    lambda: 1.5,
    lambda: [],
    lambda: {},
    lambda: [[]],
    lambda: {"": {}},
    lambda: [None],
    lambda: ["x"] * 50,
    lambda: {"step": "x"},
    lambda: 10**400,
]


def text(rng: random.Random, canary: Path, *, zero: bool = False) -> str:
    """Return a hostile string. Zero bytes occur only with `zero`, as arguments and variables cannot contain them."""
    pool = rng.choice([TEXTS, ESCAPES, INJECTIONS, REFERENCES, GRAMMAR, WORDS, NUMBERS])
    value = rng.choice(pool)
    if rng.random() < 0.1:
        value += rng.choice(TEXTS)
    if zero and rng.random() < 0.05:
        value += "\0"
    return value.replace("CANARY", str(canary))


def data(rng: random.Random, canary: Path) -> Any:
    """Return a value of any type that JSON or YAML can hold."""
    return rng.choice(DATA)() if rng.random() < 0.6 else text(rng, canary, zero=True)


def changed(rng: random.Random, content: Any, canary: Path) -> Any:
    """Return the content of a JSON or YAML file with a value replaced, removed or added."""
    if not isinstance(content, dict | list) or not content or rng.random() < 0.15:
        return data(rng, canary)
    key = rng.choice(list(content) if isinstance(content, dict) else range(len(content)))
    deed = rng.random()
    if isinstance(content, dict) and deed < 0.1:
        return {other: value for other, value in content.items() if other != key}
    if isinstance(content, dict) and deed < 0.2:
        return content | {text(rng, canary): data(rng, canary)}
    if isinstance(content, list) and deed < 0.1:
        return [*content, data(rng, canary)]
    new = changed(rng, content[key], canary)
    if isinstance(content, dict):
        return content | {key: new}
    return [new if place == key else value for place, value in enumerate(content)]
