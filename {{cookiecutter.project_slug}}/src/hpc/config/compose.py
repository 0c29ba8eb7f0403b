"""Compose one config from configs/ and what a person types; reject what cannot be meant."""

import argparse
import os
import re
from collections.abc import Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from hpc.config.errors import ArgumentParser, ConfigError, meant, nearest, reason
from hpc.config.freezing import quoted
from hpc.config.project import CONFIGS, SHIPPED_CLUSTERS, shipped_clusters
from hpc.config.sections import TEXT
from hpc.config.typed import as_list, flat
from hpc.config.yaml_files import UNREADABLE, yaml_config
from hpc.system import home

# Keys that decide what code runs. They are written in files of configs/, never typed on a command line.
CODE_KEYS = re.compile(r"(?<!\w)_(target|partial|args|check)_(?!\w)")
HYDRAS = re.compile(r"[+~]*hydra\b(?!\.searchpath\b)")  # of its words only that one changes a config
# What is asked for before anything is checked.
GROUPS = ("cluster", "strategy", "trainer", "data", "model")
# One user's accounts and partitions, for every project made from the template.
PERSONAL = home.expand(os.environ.get("XDG_CONFIG_HOME") or "~/.config") / "hpc-ml-template" / "clusters.yaml"


class Parser(ArgumentParser):
    """Looks through the folders of configs/ when help is asked for, and not on every rank of a job."""

    def format_help(self) -> str:
        self.epilog = _groups_help()
        return super().format_help()


class ClusterSearchPath(SearchPathPlugin):
    """Let Hydra find the clusters that hpc ships, wherever the project's own configs/cluster/ has no such file."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the folder above `cluster/`, as Hydra finds a group in a folder of its name."""
        for folder in [Path(entry.path) for entry in search_path.get_path() if entry.provider == "main"]:
            search_path.append("hpc", str(shipped_clusters(folder).parent))


def parser(description: str | None) -> argparse.ArgumentParser:
    """What every verb understands: overrides, `--help`, `--cfg job`."""
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = "a config group or a key of the config"
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=words, type=_with_value)
    parser.add_argument("--cfg", choices=["job"], help="print the composed config and exit")
    parser.add_argument("--resolve", action="store_true", help="with --cfg: show values instead of ${...}")
    return parser


def _with_value(word: str) -> str:
    """The word. Raises `ConfigError` where nothing stands behind `key=`, which would mean none: `ckpt=$UNSET`, say."""
    key, equals, value = word.partition("=")
    if equals and not value:
        fix = "resume=<a run directory>" if key == "resume" else f"{key}=null for none, '{key}=\"\"' for an empty text"
        raise ConfigError(word, None, "must have a value: is a variable of the shell not set?", fix)
    return word


def typed(argv: Sequence[str]) -> list[str]:
    """The words of a command line that make a config: neither options nor `resume=`."""
    return [word for word in argv if not word.startswith(("-", "resume="))]


def compose_overrides(overrides: Sequence[str], personal: bool = True, configs: Path | None = None) -> DictConfig:
    """Compose the config of these overrides and, if `personal`, this user's values for the cluster.

    Raises:
        ConfigError: a group, choice, key or value that the configs do not know.
    """
    configs = configs or CONFIGS
    for override in overrides:
        _reject_unused(override)
    try:
        with _hydra(configs):
            cfg = hydra_compose("train", [_literal(override) for override in overrides], return_hydra_config=True)
            cluster = cfg.hydra.runtime.choices.get("cluster")
            with open_dict(cfg):
                del cfg["hydra"]
    except OmegaConfBaseException as error:
        raise ConfigError(error.full_key or "config", None, str(error).splitlines()[0], "see --cfg job") from None
    except HydraException as error:
        _explain(error, overrides, configs)
    except Exception as error:  # a file that is no config can fail anywhere in Hydra
        rule = f"must compose to one config: {type(error).__name__}: {reason(error)}"
        asked = " ".join(overrides) or f"{configs}/train.yaml"
        raise ConfigError(asked, None, rule, f"correct the file below {configs}") from None
    for group in GROUPS:
        if not isinstance(OmegaConf.select(cfg, group, default=None), DictConfig):
            rule = f"must be a group of keys; {configs} and what is typed make it something else"
            raise ConfigError(group, None, rule, f"a file of configs/{group} with keys")
    if personal and (own := _personal(str(OmegaConf.select(cfg, "cluster.name")))):
        with _hydra(configs):
            searched = [override for override in overrides if override.lstrip("+").startswith("hydra.searchpath=")]
            usual = hydra_compose("train", [*searched, f"cluster={cluster}"]).cluster
        _take_personal(own, cfg.cluster, usual, {override.partition("=")[0].lstrip("+~") for override in overrides})
    return cfg


def groups(configs: Path | None = None) -> dict[str, list[str]]:
    """Return the config groups and the choices each offers: files of `configs/`, and the clusters that hpc ships."""
    configs = configs or CONFIGS
    choices: dict[str, set[str]] = {}
    for folder in (*filter(Path.is_dir, configs.iterdir()), shipped_clusters(configs)):
        choices.setdefault(folder.name, set()).update(file.stem for file in folder.glob("*.yaml"))
    return {group: sorted(choices[group] - {"base"}) for group in sorted(choices)}


def _hydra(configs: Path) -> initialize_config_dir:
    """Return the context in which Hydra composes the files of `configs/` and the clusters that hpc ships."""
    Plugins.instance().register(ClusterSearchPath)
    return initialize_config_dir(str(configs), version_base="1.3")


def _groups_help() -> str:
    lines = [f"  {group}={' | '.join(choices)}" for group, choices in groups().items()]
    return f"config groups (files of configs/; clusters also in {SHIPPED_CLUSTERS}/):\n" + "\n".join(lines)


def _literal(override: str) -> str:
    """`cluster.account=0123` with its value quoted: where a word belongs, Hydra shall not see a number."""
    key, equals, value = override.partition("=")
    if key not in TEXT or not equals or value in ("null", "???") or value[:1] in ("'", '"') or "${" in value:
        return override
    return f"{key}='{quoted(value)}'"


def _take_personal(own: dict[str, Any], cluster: DictConfig, usual: DictConfig, typed: Set[str]) -> None:
    """Let a user's own values take the place of the cluster's, but not of what is typed or an experiment says.

    Args:
        usual: the cluster where nothing but itself is chosen.
    """
    now, before = (OmegaConf.to_container(node, resolve=False) for node in (cluster, usual))
    assert isinstance(now, dict) and isinstance(before, dict)
    for key, value in own.items():
        if key not in now:
            fix = meant(key, map(str, cluster))
            raise ConfigError(f"{PERSONAL}: {key}", None, "must be a key of a cluster's file", fix)
        if f"cluster.{key}" in typed:
            continue
        if isinstance(value, dict) and isinstance(now[key], dict):  # env: name by name, as Hydra does it
            known = {name for name in value if now[key].get(name) == (before.get(key) or {}).get(name)}
            with open_dict(cluster[key]):
                cluster[key].update({name: value[name] for name in known if f"cluster.{key}.{name}" not in typed})
        elif now[key] == before.get(key):
            cluster[key] = value


def _personal(cluster: str) -> dict[str, Any]:
    """What this user's own file says of a cluster: account, partition and the like."""
    if not PERSONAL.is_file():
        return {}
    try:
        return dict((OmegaConf.to_container(yaml_config(PERSONAL)).get(cluster) or {}).items())  # type: ignore
    except UNREADABLE as error:
        rule = f"must be YAML, cluster names with keys of a cluster's file: {reason(error)}"
        raise ConfigError(str(PERSONAL), None, rule, f"{cluster}: {{account: ...}}") from None


def _reject_unused(override: str) -> None:
    if CODE_KEYS.search(override):
        raise ConfigError(
            override, None, "what code runs is written in a file, not typed", f"add a file below {CONFIGS}"
        )
    if HYDRAS.match(override):
        rule = "is a word for Hydra's launcher, which does not start these programs: it would change nothing"
        raise ConfigError(
            override, None, rule, "run_dir=<folder> for where a run lies; submit.py --multirun for several"
        )


def _fix(key: str, overrides: Sequence[str], configs: Path) -> str:
    """What to type instead of a key that these choices do not have: with a + if what is built there takes it."""
    from hpc.config import signatures

    others = [override for override in overrides if override.partition("=")[0] != key]
    cfg = compose_overrides(others if len(others) < len(overrides) else [], configs=configs)
    above, _, last = key.rpartition(".")
    target = OmegaConf.select(cfg, f"{above}._target_", default=None) if above else None
    with suppress(ConfigError):
        if isinstance(target, str) and last in signatures.signature(target).parameters:
            return f"+{key}=..."
    return meant(key, [*flat(cfg), *groups(configs)])


def _explain(error: HydraException, overrides: Sequence[str], configs: Path) -> NoReturn:
    """Turn one of Hydra's errors into a rejection that names key, value, rule and fix."""
    text = str(error)
    if isinstance(error, OverrideParseException):
        key, _, value = str(error.override).partition("=")
        quoted = value.replace("\\", "\\\\").replace('"', '\\"')
        fix = f"""'{key}="{quoted}"'"""
        if value.startswith("[") or key in ("cluster.options", "cluster.setup"):
            fix = as_list(key, value)
        raise ConfigError(
            error.override, None, "is not key=value as Hydra reads it", f"quote the value: {fix}"
        ) from None
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, choice = error.missing_cfg_file.replace(".yaml", "").rpartition("/")
        choices = groups(configs).get(group, [])
        fix = f"{group}={nearest(choice, choices, 'one of them')}"
        if group == "cluster":
            fix += f", or add configs/cluster/{choice}.yaml, as those in {SHIPPED_CLUSTERS}/ are"
        raise ConfigError(group or choice, choice, f"is one of {', '.join(choices)}", fix) from None
    if found := re.search(r"Ambiguous value for argument '([^']*)'", text):
        rule = "names several values: of several runs, or of one list"
        raise ConfigError(found.group(1), None, rule, "python submit.py --multirun ..., or key=[a,b]") from None
    if found := re.search(r"Could not override '([^']+)'", text):
        key = found.group(1)
        raise ConfigError(
            key, None, "is no group or key of configs/ (+key=value adds one)", _fix(key, overrides, configs)
        )
    cause = error.__cause__ or error
    raise ConfigError(
        " ".join(overrides) or "configs/train.yaml", None, str(cause).splitlines()[0], "see --help"
    ) from None
