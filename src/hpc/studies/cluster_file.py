"""The file of a cluster, as text: written from facts, or compared with them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import yaml

from hpc.config.sections import ClusterConfig
from hpc.studies.cluster_choices import Choice
from hpc.studies.cluster_facts import Fact, is_same_request

COMMENT_COLUMN = 40


def render(name: str, facts: Sequence[Fact], *, title: Sequence[str]) -> str:
    """Return the text of configs/cluster/NAME.yaml.

    Args:
        title: lines of the comment at its top.
    """
    lines = [f"# {line}" for line in title]
    lines += ["defaults: [base]", f"name: {_as_yaml(name)}"]
    for fact in facts:
        lines.append(f"{fact.key}: {_as_yaml(fact.value)}".ljust(COMMENT_COLUMN - 1) + f" # {fact.source}")
    return "\n".join(lines) + "\n"


def _as_yaml(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=math.inf).removesuffix("...\n").strip()
    is_quoted = isinstance(value, str) and (text[:1] == "'" or ":" in value)  # 1:00:00 is a number in YAML 1.1
    return f'"{value}"' if is_quoted and '"' not in str(value) else text


def render_modules(modules: Sequence[str]) -> str:
    """Return the text of configs/cluster/NAME.sh, which loads the modules that are loaded now."""
    lines = ["# Modules, in env.sh and in jobs: those that were loaded when tools/cluster.py wrote this."]
    return "\n".join([*lines, *(f"module load {module} || return" for module in modules)]) + "\n"


def describe_others(choice: Choice, choices: Sequence[Choice], word: str) -> list[str]:
    """Return a line for each of the other nodes with GPUs, and how to get a file for them."""
    lines = [f"  {other}" for other in choices if not other.is_same_as(choice)]
    return [f"Other nodes with GPUs (--{word} and --gpu choose them):", *lines] if lines else []


def compare(existing: Mapping[str, Any], facts: Sequence[Fact]) -> list[str]:
    """Return a line for each key of a file that differs from a fact. What is unknown, or a name for ssh, is left out.

    Args:
        existing: keys and values of the file, without those that it takes from the base.
    """
    defaults = {field.name: field.default for field in fields(ClusterConfig)}
    lines = []
    for fact in facts:
        value = existing.get(fact.key, defaults.get(fact.key))
        is_equal = value == fact.value or (fact.key == "request" and is_same_request(str(value), str(fact.value)))
        if fact.value is not None and fact.key != "login_host" and not is_equal:
            lines.append(f"{fact.key}: the file has {_as_yaml(value)}; {_as_yaml(fact.value)} by {fact.source}")
    return lines
