"""The one composed config: compose it, refuse what cannot be meant, build objects from it.

Imports neither torch nor lightning: it also runs on login nodes, and must answer at once.
"""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers.oc import env
from yaml import YAMLError

from .layout import TEXT

PROJECT = Path(__file__).resolve().parents[3]
CONFIGS = PROJECT / "configs"
PACKAGE = __name__.split(".")[0]
# Keys that decide what code runs. They are written in files of configs/, never typed on a command line.
CODE_KEYS = re.compile(r"(?<!\w)_(target|partial|args|check)_(?!\w)")

# One user's accounts and partitions, for every project made from the template.
PERSONAL = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "hpc-ml-template" / "clusters.yaml"

T = TypeVar("T")


class Refused(Exception):
    """A mistake told before anything is written: what was asked, the rule, the fix to type."""

    def __init__(self, key: str, value: object, rule: str, fix: str, alone: bool = False) -> None:
        self.key, self.value, self.rule, self.fix = key, value, rule, fix
        self.alone = alone  # only this rank knows
        asked = key if value is None else f"{key}={value}"
        super().__init__(f"{asked}\n  rule: {rule}\n  fix:  {fix}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Cross process borders whole: a data worker's refusal reaches the screen as it was raised."""
        return type(self), (self.key, self.value, self.rule, self.fix, self.alone)


@contextmanager
def refusals(speaks: bool = True) -> Iterator[None]:
    """Print a refusal on stderr and leave with exit code 2, no traceback. Of ranks that all know it, one speaks."""
    try:
        yield
    except Refused as refused:
        if speaks or refused.alone:
            sys.stderr.write(f"refused: {refused}\n")  # at once: other ranks and srun write into the same log
        sys.exit(2)


def nearest(word: str, known: Iterable[str], otherwise: str) -> str:
    """The known word closest to a mistyped one, or `otherwise` when none is close."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1)), otherwise)


def meant(word: str, known: Iterable[str], prefix: str = "") -> str:
    """What to type instead of a mistyped key."""
    close = nearest(word, known, "")
    return f"{_dotted(prefix, close)}=..." if close else "remove it, or see --cfg job for the keys there are"


def compose(description: str | None, argv: Sequence[str]) -> DictConfig:
    """The config for the command line of one run. Raises `Refused`."""
    words = parser(description)
    words.add_argument("--multirun", "-m", action="store_true", help=argparse.SUPPRESS)
    asked = words.parse_intermixed_args(argv)
    if asked.multirun:
        rule = "one process trains one run; under srun, every rank would start all of them"
        raise Refused("--multirun", None, rule, "python submit.py --multirun ..., which makes a job array")
    return composed(asked)


def parser(description: str | None) -> argparse.ArgumentParser:
    """What every verb understands: overrides, `--help`, `--cfg job`."""
    parser = argparse.ArgumentParser(
        description=description, epilog=_groups_help(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="a config group or a key of the config")
    parser.add_argument("--cfg", choices=["job"], help="print the composed config and exit")
    parser.add_argument("--resolve", action="store_true", help="with --cfg: show values instead of ${...}")
    return parser


def composed(asked: argparse.Namespace) -> DictConfig:
    """The config for parsed arguments; prints it and exits with 0 if `--cfg job` asks for that.

    Raises:
        Refused: a group, choice, key or value that the configs do not know.
    """
    resumed = resumes(asked.overrides)
    cfg = load(resumed) if resumed else compose_overrides(asked.overrides)
    if asked.cfg:
        try:
            print(OmegaConf.to_yaml(cfg, resolve=asked.resolve), end="")
        except OmegaConfBaseException as error:
            raise Refused("--resolve", None, str(error).splitlines()[0], "--cfg job without --resolve") from None
        sys.exit(0)
    return cfg


def resumes(overrides: Sequence[str]) -> Path | None:
    """The run directory that `resume=` names, if it does.

    Raises:
        Refused: something else stands beside it: the run's config is frozen.
    """
    found = [word.partition("=")[2] for word in overrides if word.startswith("resume=")]
    if found and len(overrides) > 1:
        other = next((word for word in overrides if not word.startswith("resume=")), overrides[1])
        raise Refused(other, None, "a run goes on with the config it was started with", f"resume={found[0]} alone")
    return Path(found[0]).expanduser().absolute() if found else None


def compose_overrides(overrides: Sequence[str], personal: bool = True) -> DictConfig:
    """The config for these overrides and, if `personal`, this user's own values for the cluster. Raises `Refused`."""
    for override in overrides:
        _refuse_code(override)
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            cfg = hydra_compose("train", [_literal(override) for override in overrides])
    except OmegaConfBaseException as error:
        raise Refused(error.full_key or "config", None, str(error).splitlines()[0], "see --cfg job") from None
    except HydraException as error:
        _explain(error, overrides)
    typed_here = {override.partition("=")[0].lstrip("+") for override in overrides}
    for key, value in _personal(str(cfg.cluster.name)).items() if personal else ():
        if key not in cfg.cluster:
            raise Refused(f"{PERSONAL}: {key}", None, "is no key of configs/cluster", meant(key, map(str, cfg.cluster)))
        if f"cluster.{key}" not in typed_here:
            cfg.cluster[key] = value
    return cfg


def frozen(cfg: DictConfig) -> str:
    """The config as YAML, resolved, but what comes from the environment stays a reference: it may be a secret."""
    environment = OmegaConf.register_new_resolver
    environment("oc.env", _reference, replace=True)
    try:
        return OmegaConf.to_yaml(OmegaConf.create(OmegaConf.to_container(cfg, resolve=True)))
    finally:
        environment("oc.env", env, replace=True)


def _reference(name: str, *default: str | None) -> str:
    """`${oc.env:NAME,default}` as it was written, more or less."""
    words = [name, *("null" if word is None else f"'{_quoted(str(word))}'" for word in default)]
    return f"${{oc.env:{','.join(words)}}}"


def load(run_dir: Path) -> DictConfig:
    """The frozen config of a run. Raises `Refused` where there is none that can be read."""
    path = run_dir / "config.yaml"
    try:
        cfg = OmegaConf.load(path)
        assert isinstance(cfg, DictConfig)
    except (OSError, AssertionError, YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        rule = f"{path} is not the config of a run: {str(error).splitlines()[0] if str(error) else 'no keys'}"
        raise Refused("resume", run_dir, rule, "resume=<a run directory>", alone=True) from None
    OmegaConf.set_struct(cfg, True)
    return cfg


def groups() -> dict[str, list[str]]:
    """Config groups and the choices each offers, read from the folder `configs/`."""
    return {
        folder.name: sorted(file.stem for file in folder.glob("*.yaml") if file.stem != "base")
        for folder in sorted(CONFIGS.iterdir())
        if folder.is_dir()
    }


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
            raise Refused(_dotted(name, key), None, rule, meant(key, known, name))
    values: dict[str, Any] = {}
    blank = OmegaConf.structured(schema)
    for key, kind in known.items():
        if key not in node:
            continue
        value = None if kind is Any else node.get(key)
        if kind in (str, str | None) and isinstance(value, bool | int | float):
            rule = f"is a word, and YAML reads it as {value!r} (no, 0123 and 1:30:00 are no words to it)"
            raise Refused(_dotted(name, key), None, rule, f'quote it: {key}: "..."')
        try:
            blank[key] = value
            values[key] = blank[key]
        except OmegaConfBaseException:
            kind = getattr(kind, "__name__", str(kind))
            raise Refused(_dotted(name, key), value, f"is of type {kind}", f"{_dotted(name, key)}=<{kind}>") from None
    for field in fields(schema):  # type: ignore[arg-type]
        if field.default is MISSING and field.name not in values:
            raise Refused(
                _dotted(name, field.name),
                None,
                f"{name or 'the config'} has to say it",
                f"{field.name}: ... in its file",
            )
    return schema(**values)


def build(node: Any, **kwargs: Any) -> Any:
    """Objects for a config node: the only caller of Hydra's instantiate."""
    from hydra.utils import instantiate

    return instantiate(without_checks(node), _convert_="all", **kwargs)


def without_checks(node: Any) -> Any:
    """A plain, resolved copy of a node without the `_check_` entries, which are ours and not arguments."""
    if OmegaConf.is_config(node):
        node = OmegaConf.to_container(node, resolve=True)
    if isinstance(node, dict):
        return {key: without_checks(value) for key, value in node.items() if key != "_check_"}
    return [without_checks(value) for value in node] if isinstance(node, list) else node


def _dotted(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


def _groups_help() -> str:
    lines = [f"  {group}={' | '.join(choices)}" for group, choices in groups().items()]
    return "config groups (files of configs/):\n" + "\n".join(lines)


def _literal(override: str) -> str:
    """`cluster.account=0123` with its value quoted: where a word belongs, Hydra shall not see a number."""
    key, equals, value = override.partition("=")
    if key not in TEXT or not equals or value in ("null", "???") or value[:1] in ("'", '"') or "${" in value:
        return override
    return f"{key}='{_quoted(value)}'"


def _quoted(value: str) -> str:
    """As Hydra wants it between single quotes: quotes, and the backslashes before them, escaped."""
    return re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), value)


def _personal(cluster: str) -> dict[str, Any]:
    """What this user's own file says of a cluster: account, partition and the like."""
    if not PERSONAL.is_file():
        return {}
    try:
        return dict((OmegaConf.to_container(OmegaConf.load(PERSONAL)).get(cluster) or {}).items())  # type: ignore
    except (OSError, YAMLError, OmegaConfBaseException, AttributeError, UnicodeDecodeError) as error:
        rule = f"is YAML, cluster names with keys of configs/cluster: {str(error).splitlines()[0]}"
        raise Refused(str(PERSONAL), None, rule, f"{cluster}: {{account: ...}}") from None


def _refuse_code(override: str) -> None:
    if CODE_KEYS.search(override):
        raise Refused(override, None, "what code runs is written in a file, not typed", f"add a file below {CONFIGS}")


def _explain(error: HydraException, overrides: Sequence[str]) -> NoReturn:
    """Turn one of Hydra's errors into a refusal that names key, value, rule and fix."""
    text = str(error)
    if isinstance(error, OverrideParseException):
        key, _, value = str(error.override).partition("=")
        quoted = value.replace("\\", "\\\\").replace('"', '\\"')
        raise Refused(
            error.override, None, "is not key=value as Hydra reads it", f"""quote the value: '{key}="{quoted}"'"""
        ) from None
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, choice = error.missing_cfg_file.replace(".yaml", "").rpartition("/")
        choices = groups().get(group, [])
        fix = nearest(choice, choices, "one of them")
        raise Refused(group or choice, choice, f"is one of {', '.join(choices)}", f"{group}={fix}") from None
    if found := re.search(r"Ambiguous value for argument '([^']*)'", text):
        rule = "names several values: of several runs, or of one list"
        raise Refused(found.group(1), None, rule, "python submit.py --multirun ..., or key=[a,b]") from None
    if found := re.search(r"Could not override '([^']+)'", text):
        key = found.group(1)
        known = list(flat(compose_overrides([]))) + list(groups())
        raise Refused(key, None, "is no group or key of configs/ (+key=value adds one)", meant(key, known)) from None
    cause = error.__cause__ or error
    raise Refused(" ".join(overrides) or "configs/train.yaml", None, str(cause).splitlines()[0], "see --help") from None


def flat(node: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves of a config as `dotted.key: raw value`; interpolations are left as they are written."""
    if isinstance(node, DictConfig):
        node = OmegaConf.to_container(node, resolve=False)
    if not isinstance(node, dict) or not node:
        return {prefix: node}
    leaves: dict[str, Any] = {}
    for key, value in node.items():
        leaves |= flat(value, _dotted(prefix, str(key)))
    return leaves
