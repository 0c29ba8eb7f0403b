"""The one config: its values typed, frozen and loaded again, objects built from it; what cannot be meant is refused.

Imports neither torch nor lightning: it also runs on login nodes, and must answer at once.
"""

import argparse
import difflib
import errno
import io
import json
import math
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from traceback import walk_tb
from typing import Any, NoReturn, TypeVar

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers.oc import decode, env
from yaml import YAMLError

from . import files

PROJECT = Path(__file__).resolve().parents[3]
CONFIGS = PROJECT / "configs"
PACKAGE = __name__.split(".")[0]


T = TypeVar("T")


# Control characters, which a terminal obeys, but for line feed and tab; and marks that turn the direction of text.
UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def printable(text: str, also: str = "") -> str:
    """Text that may come from anywhere, for a terminal: what it would obey is written out, as `\\x1b`."""
    for mark in also:
        text = text.replace(mark, ascii(mark)[1:-1])
    return UNSEEN.sub(lambda found: ascii(found[0])[1:-1], text)


class ArgumentParser(argparse.ArgumentParser):
    """Names what is wrong with a command line without sending it to the terminal raw."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message, "\n"))


class Refused(Exception):
    """A mistake told before anything is written: what was asked, the rule, the fix to type."""

    def __init__(self, key: str, value: object, rule: str, fix: str, alone: bool = False) -> None:
        self.key, self.value, self.rule, self.fix = key, value, rule, fix
        self.alone = alone  # only this rank knows
        asked = printable(key if value is None else f"{key}={value}", "\n")
        super().__init__(f"{asked}\n  rule: {printable(rule)}\n  fix:  {printable(fix)}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Cross process borders whole: a data worker's refusal reaches the screen as it was raised."""
        return type(self), (self.key, self.value, self.rule, self.fix, self.alone)


class Finished(Refused):
    """Nothing is left to do: for a job that the scheduler has started again this is no mistake."""


@contextmanager
def refusals(speaks: bool = True) -> Iterator[None]:
    """Print a refusal on stderr and leave with exit code 2, no traceback. Of ranks that all know it, one speaks."""
    try:
        yield
    except Finished as finished:
        if speaks or finished.alone:
            print(f"{finished.rule} already\nrun directory {printable(str(finished.value))}", flush=True)
        sys.exit(0)
    except (Refused, OmegaConfBaseException) as error:
        refused = error if isinstance(error, Refused) else unusable(error)
        if speaks or refused.alone:
            sys.stderr.write(f"refused: {refused}\n")  # at once: other ranks and srun write into the same log
        sys.exit(2)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        refused = Refused(f"{str(error.filename)[:60]}...", None, "must be shorter to be a file", "another name")
        sys.stderr.write(f"refused: {refused}\n")
        sys.exit(2)


def unusable(error: OmegaConfBaseException) -> Refused:
    """A value of the config that is asked for, and is not there or cannot be resolved."""
    return Refused(error.full_key or "config", None, f"must have a value: {reason(error)}", "see --cfg job")


def nearest(word: str, known: Iterable[str], otherwise: str) -> str:
    """The known word closest to a mistyped one, or `otherwise` when none is close."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1)), otherwise)


def meant(word: str, known: Iterable[str], prefix: str = "") -> str:
    """What to type instead of a mistyped key."""
    close = nearest(word, known, "")
    return f"{dotted(prefix, close)}=..." if close else "remove it, or see --cfg job for the keys there are"


def frozen(cfg: DictConfig) -> str:
    """The config as YAML, resolved, but what comes from the environment stays a reference: it may be a secret."""
    return OmegaConf.to_yaml(OmegaConf.create(_as_written(cfg)))


@contextmanager
def references(written: Callable[..., Any]) -> Iterator[None]:
    """Meanwhile `${oc.env:NAME,default}` gives what `written` makes of these words, not a value: it may be secret."""
    OmegaConf.register_new_resolver("oc.env", written, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", env, replace=True)


def from_environment(cfg: DictConfig) -> dict[str, str]:
    """What `${oc.env:NAME}` has given to this config, by itself or in a longer text, and how each is written."""
    known: dict[str, str] = {}

    def note(name: str, *default: str | None) -> Any:
        if (value := env(name, *default)) is not None:
            known[str(value)] = _reference(name, *default)
        return value

    with references(note):
        values = OmegaConf.to_container(cfg, resolve=True)
    return dict(_texts(values, _as_written(cfg))) | known


def _as_written(cfg: DictConfig) -> Any:
    """All of it resolved, but for what comes from the environment, by itself or through `${oc.decode:}`."""

    def decoded(text: str | None, _parent_: Any, _node_: Any) -> Any:
        return f"${{oc.decode:{text}}}" if "${oc.env:" in (text or "") else decode(text, _parent_, _node_)

    with references(_reference):
        OmegaConf.register_new_resolver("oc.decode", decoded, replace=True)
        try:
            return OmegaConf.to_container(cfg, resolve=True)
        finally:
            OmegaConf.register_new_resolver("oc.decode", decode, replace=True)


def _texts(values: Any, written: Any) -> Iterator[tuple[str, str]]:
    """Texts of one container that are others at the same place of the second, where one text may stand for many."""
    if isinstance(values, dict | list):
        for key in values if isinstance(values, dict) else range(len(values)):
            yield from _texts(values[key], written if isinstance(written, str) else written[key])
    elif isinstance(values, str) and values != written:
        yield values, written


def _reference(name: str, *default: str | None) -> str:
    """`${oc.env:NAME,default}` as it was written, more or less."""
    words = [name, *("null" if word is None else f"'{quoted(str(word))}'" for word in default)]
    return f"${{oc.env:{','.join(words)}}}"


# What reading YAML that somebody else wrote can raise.
UNREADABLE = (OSError, ValueError, TypeError, AttributeError, RecursionError, YAMLError, OmegaConfBaseException)
LARGEST = 100_000  # nodes of a YAML file; ours have some hundred


def yaml_config(path: Path) -> DictConfig | ListConfig:
    """A YAML file that may come from anywhere. Raises one of `UNREADABLE`."""
    text = files.text(path)
    if "&" in text and (most := _nodes(yaml.compose(text, yaml.SafeLoader), {})) > LARGEST:
        raise ValueError(f"its aliases stand for {most:.0e} values")
    return OmegaConf.load(io.StringIO(text))


def _nodes(node: Any, known: dict[int, float]) -> float:
    """How many there are when each alias is replaced by what it stands for."""
    if id(node) not in known:
        known[id(node)] = math.inf  # an alias of what it is in
        inside = [part for pair in node.value for part in (pair if isinstance(pair, tuple) else [pair])]
        known[id(node)] = 1 + sum(_nodes(part, known) for part in inside if isinstance(part, yaml.Node))
    return known[id(node)]


def reason(error: BaseException) -> str:
    """An error in one line."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def load(run_dir: Path) -> DictConfig:
    """The frozen config of a run. Raises `Refused` where there is none that can be read."""
    path = run_dir / "config.yaml"
    other = f"resume=<a run directory>; what weights are left start a new run: ckpt={run_dir}/checkpoints/last.ckpt"
    if not run_dir.is_dir():
        rule = "is a file" if run_dir.exists() else "there is no such directory"
        raise Refused("resume", run_dir, rule, "resume=<a run directory>", alone=True)
    if not path.exists():
        rule = "holds no config.yaml: no run was started here, or it is half-deleted; of a sweep, name one of its runs"
        raise Refused("resume", run_dir, rule, other, alone=True)
    try:
        cfg = yaml_config(path)
        if not isinstance(cfg, DictConfig) or not cfg:
            raise ValueError("no keys")
    except UNREADABLE as error:
        rule = f"{path} is damaged: {reason(error)}"
        raise Refused("resume", run_dir, rule, other, alone=True) from None
    OmegaConf.set_struct(cfg, True)
    return cfg


def as_list(key: str, text: str) -> str:
    """How this is typed as a list in a shell: each element in quotes of its own, as Hydra wants it."""
    elements = text[1:].removesuffix("]").split(",") if text.startswith("[") else [text]
    quoted = (json.dumps(element.strip(" '\""), ensure_ascii=False) for element in elements)
    return shlex.quote(f"{key}=[{','.join(quoted)}]")


def typed(schema: type[T], node: DictConfig, name: str, *, only_ours: bool = False) -> T:
    """`node` as the dataclass `schema`, its values checked against the annotations.

    Args:
        name: dotted key of the node, for messages; "" for the whole config.
        only_ours: the node has other keys as well, which somebody else judges.

    Raises:
        Refused: a key the dataclass does not have, or a value of another type.
    """
    known = {field.name: field.type for field in fields(schema)}  # type: ignore[arg-type]
    for key in map(str, node):
        if key not in known and not only_ours:
            rule = f"{name or 'the config'} has the keys {', '.join(known)}"
            raise Refused(dotted(name, key), None, rule, meant(key, known, name))
    values: dict[str, Any] = {}
    blank = OmegaConf.structured(schema)
    for key, kind in known.items():
        if key not in node:
            continue
        try:
            value = None if kind is Any else node.get(key)
        except OmegaConfBaseException as error:
            rule = f"must have a value: {str(error).splitlines()[0]}"
            raise Refused(dotted(name, key), None, rule, f"{dotted(name, key)}=<value>") from None
        if kind in (str, str | None) and isinstance(value, bool | int | float):
            rule = f"is a word, and YAML reads it as {value!r} (no, 0123 and 1:30:00 are no words to it)"
            raise Refused(dotted(name, key), None, rule, f'quote it: {key}: "..."')
        try:
            blank[key] = value
            values[key] = blank[key]
        except OmegaConfBaseException:
            kind = getattr(kind, "__name__", str(kind))
            fix = f"{dotted(name, key)}=<{kind}>"
            if kind == "list" and isinstance(value, str):
                fix = as_list(dotted(name, key), value)
            raise Refused(dotted(name, key), value, f"is of type {kind}", fix) from None
    for field in fields(schema):  # type: ignore[arg-type]
        if field.default is MISSING and field.name not in values:
            raise Refused(
                dotted(name, field.name),
                None,
                f"{name or 'the config'} has to say it",
                f"{field.name}: ... in its file",
            )
    return schema(**values)


def build(node: Any, **kwargs: Any) -> Any:
    """Objects for a config node: the only caller of Hydra's instantiate.

    Raises:
        Refused: a library does not take the values that the config gives it.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    try:
        return instantiate(without_checks(node), _convert_="all", **kwargs)
    except InstantiationException as error:
        refuse_arguments(error)
        raise


# What constructors raise for values that they cannot use.
NOT_TAKEN = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError)


def refuse_arguments(error: BaseException) -> None:
    """Raises `Refused` where a library that the config names does not take the values that the config gives it.

    What fails within the project's own code does so for its author, with a traceback.
    """
    from hydra.errors import InstantiationException

    cause = error.__cause__ if isinstance(error, InstantiationException) else error
    if isinstance(cause, Refused) and cause is not error:  # by what was to be built
        raise cause
    if not isinstance(cause, NOT_TAKEN) and type(cause) is not RuntimeError:  # no want of memory, say
        return
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(cause.__traceback__)]
    calls = [number for number, module in enumerate(modules) if module.split(".")[0] == "hydra"]
    called = modules[calls[-1] + 1 :] if calls else [PACKAGE]  # nothing: the call itself does not fit
    if called and called[0].split(".")[0] == PACKAGE and not called[0].startswith(f"{PACKAGE}.hpc."):
        return
    by = f" by {called[0]}" if called else ""
    key = found[1] if (found := re.search(r"full_key: (\S+)", str(error))) else "config"
    rule = f"the values must be such as are taken{by}: {type(cause).__name__}: {reason(cause)}"
    raise Refused(key, None, rule, "correct them; --cfg job shows the whole config") from error


def build_each(group: DictConfig) -> list[Any]:
    """The objects of a group; without entries that are null, and without objects that say they are not `enabled`.

    Lightning calls every callback at every step: one that has nothing to do would cost time all the same.
    """
    built = [build(node) for node in group.values() if node]
    return [one for one in built if getattr(one, "enabled", True)]


def without_checks(node: Any) -> Any:
    """A plain, resolved copy of a node without the `_check_` entries, which are ours and not arguments."""
    if OmegaConf.is_config(node):
        node = OmegaConf.to_container(node, resolve=True)
    if isinstance(node, dict):
        return {key: without_checks(value) for key, value in node.items() if key != "_check_"}
    return [without_checks(value) for value in node] if isinstance(node, list) else node


def dotted(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


def flat(node: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves of a config as `dotted.key: raw value`; interpolations are left as they are written."""
    if isinstance(node, DictConfig):
        node = OmegaConf.to_container(node, resolve=False)
    if not isinstance(node, dict) or not node:
        return {prefix: node}
    leaves: dict[str, Any] = {}
    for key, value in node.items():
        leaves |= flat(value, dotted(prefix, str(key)))
    return leaves


def quoted(value: str) -> str:
    """As Hydra wants it between single quotes: quotes, and the backslashes before them, escaped."""
    return re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), value)
