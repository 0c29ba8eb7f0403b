"""What a person types, as Hydra must read it: with the plus that Hydra wants, texts in quotes, trusted classes only."""

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from hpc.config import batch_size, signatures, trust
from hpc.config.errors import ConfigError
from hpc.config.freezing import escape_quotes
from hpc.config.project import CONFIGS
from hpc.config.sections import TEXT_KEYS

# Keys that decide what code runs.
CODE_KEYS = re.compile(r"(?<!\w)_(target|check)_(?!\w)")
# Keys of Hydra itself. Of these, only hydra.searchpath changes a config.
HYDRA_KEYS = re.compile(r"[+~]*hydra\b(?!\.searchpath\b)")
# Keys beside the arguments of the data's class, whichever of them a file of configs/data/ has.
DATA_KEYS = {f"data.{key}" for key in (batch_size.GLOBAL, batch_size.PER_DEVICE, batch_size.OF_LOADERS)}
VALUE = re.compile(r"\+{0,2}(?!hydra\.)\w+(\.\w+)+=")  # an override of a value; the name of a group has no dot
# Groups of which Hydra accepts no null, though it says what is meant: none of its files.
OPTIONAL_GROUPS = ("callbacks", "logger")


def in_hydras_grammar(override: str) -> str:
    """Return an override as Hydra must read it: a text such as `cluster.account=0123` in quotes, or it is a number."""
    key, equals, value = override.partition("=")
    bare = key.lstrip("+")
    if bare in OPTIONAL_GROUPS and value == "null":
        return f"~{bare}"
    if bare in TEXT_KEYS and equals and not (value in ("null", "???") or value[:1] in ("'", '"') or "${" in value):
        value = f"'{escape_quotes(value)}'"
    # A plus adds a key, or sets one that exists: it can only mean one thing. Likewise what has a class of its own.
    if VALUE.match(override) and (key != bare or CODE_KEYS.search(override) or bare in DATA_KEYS):
        key = f"++{bare}"
    return f"{key}{equals}{value}"


def without_needless_plus(words: Sequence[str], error: HydraException) -> list[str]:
    """Return the words without the plus of which Hydra says in `error` that the group or key exists."""
    match = re.match(r"Multiple values for ([\w/@]+)\.|Could not append .* already at '(\w+)'", str(error))
    name = match and (match[1] or match[2])
    return [word.removeprefix("+") if word.startswith(f"+{name}=") else word for word in words]


def with_plus_for_arguments(words: Sequence[str], base: DictConfig) -> list[str]:
    """Return the words with a plus wherever the class at that place accepts the argument.

    Args:
        base: the config without the words that `sets_value`.
    """
    return [f"++{word}" if _is_argument(word, base) else word for word in words]


def sets_value(word: str) -> bool:
    """Return whether an override sets the value of a key that may not exist."""
    return not word.startswith("+") and bool(VALUE.match(word))


def _is_argument(word: str, cfg: DictConfig) -> bool:
    """Return whether an override without a plus sets an argument that the class at that place accepts by name."""
    if not sets_value(word):
        return False
    above, _, last = word.partition("=")[0].rpartition(".")
    node = OmegaConf.select(cfg, above, default=None)
    if not isinstance(node, DictConfig) or last in node or not isinstance(target := node.get("_target_"), str):
        return False
    with suppress(ConfigError):  # the rules report a class that cannot be found
        return last in signatures.read_signature(target).parameters
    return False


def reject_forbidden(override: str) -> None:
    """Raise `ConfigError` for an override that would build what is not trusted, or that would have no effect."""
    if HYDRA_KEYS.match(override):
        rule = "must be left out: it is for Hydra's launcher, which does not start these programs"
        fix = "run_dir=<folder> for the run directory; submit.py --multirun for several runs"
        raise ConfigError(override, None, rule, fix)
    if not CODE_KEYS.search(override):
        return
    try:
        parsed = OverridesParser.create().parse_override(override)
        value: Any = parsed.value()
    except (HydraException, ValueError):
        return  # Hydra itself says what is wrong with it
    for key, leaf in trust.leaves({str(parsed.get_key_element()).lstrip("+~"): value}):
        kind = key.rpartition(".")[2]
        is_code = kind in ("_target_", "_check_")
        rule = trust.broken_rule(leaf, kind) if is_code else ""
        if not is_code and isinstance(leaf, str) and trust.NODE_MAKING_RESOLVERS.search(leaf):
            rule = "must not create nodes from text or compute names"
        if rule:
            line = trust.trusting_line(str(leaf)) if is_code else ""
            fix = f"a file below {CONFIGS} that names it" + f", or {line}" * bool(line)
            raise ConfigError(key, str(leaf), f"{rule}: what is typed here decides what code runs", fix)


def last_choices(overrides: Sequence[str]) -> list[str]:
    """Return the overrides without `~group` where `group=choice` comes later: Hydra would remove the group anyway."""
    kept = []
    for number, override in enumerate(overrides, start=1):
        if not (override[:1] == "~" and any(word.startswith(f"{override[1:]}=") for word in overrides[number:])):
            kept.append(override)
    return kept
