"""Compose one config from configs/ and what a person types. Reject overrides that can only be mistakes."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from hpc.config import defaults, personal_clusters, trainer_arguments, typed_words
from hpc.config.conversion import flatten, format_list_override
from hpc.config.errors import ConfigError, closest_word, first_line, suggest_key
from hpc.config.project import CONFIGS

# Groups that are used before the config is checked.
REQUIRED_GROUPS = ("cluster", "strategy", "trainer", "data", "model")


def select_overrides(argv: Sequence[str]) -> list[str]:
    """Return the words of a command line that Hydra composes: neither options nor `resume=`."""
    return [word for word in argv if not word.startswith(("-", "resume="))]


def compose_overrides(overrides: Sequence[str], *, personal: bool = True, configs: Path | None = None) -> DictConfig:
    """Compose the config of some overrides.

    Args:
        personal: whether to take this user's values for the cluster from `PERSONAL_CLUSTERS`.
        configs: the folder of config files; None: this project's.

    Raises:
        ConfigError: a group, choice, key or value that the configs do not have.
    """
    configs = configs or CONFIGS
    for override in overrides:
        typed_words.reject_forbidden(override)
    values = personal_clusters.register(is_used=personal)
    try:
        with initialize_hydra(configs):
            words = [typed_words.in_hydras_grammar(override) for override in overrides]
            cfg = _compose_typed(typed_words.last_choices(words))
            choices = cfg.hydra.runtime.choices
            with open_dict(cfg):
                del cfg["hydra"]
                cfg.setdefault("callbacks", {})  # ~callbacks
    except OmegaConfBaseException as error:
        fix = f"correct this override, or the file below {configs}"
        raise ConfigError(error.full_key or "config", None, str(error).splitlines()[0], fix) from None
    except HydraException as error:
        _raise_config_error(error, overrides, configs=configs)
    except Exception as error:  # a file that is not a config can fail anywhere in Hydra
        rule = f"must compose to one config: {type(error).__name__}: {first_line(error)}"
        if mark := getattr(error, "problem_mark", None):  # of the YAML parser
            rule = f"must compose to one config; {mark.name}, line {mark.line + 1}, is no YAML: {error.problem}"  # type: ignore[attr-defined]
        key = " ".join(overrides) or f"{configs}/train.yaml"
        raise ConfigError(key, None, rule, f"correct the file below {configs}") from None
    for group in REQUIRED_GROUPS:
        if not isinstance(OmegaConf.select(cfg, group, default=None), DictConfig):
            rule = f"must be a group of keys, and {configs} with these overrides makes it something else"
            raise ConfigError(group, None, rule, f"a file of configs/{group} with keys")
    if cfg.get("name", "") is None:
        cfg.name = _default_name(choices)
    cluster = str(choices.get("cluster"))
    is_taken = f"{personal_clusters.GROUP}@cluster" in choices
    personal_clusters.check(values, name=cluster, is_taken=is_taken)
    _check_cluster_name(cfg, cluster)
    trainer_arguments.read_as_lightning(cfg)
    return cfg


def with_values(cfg: DictConfig, overrides: Sequence[str]) -> DictConfig | None:
    """Return a copy of a composed config with other values of its keys; None if it must be composed anew."""
    copy, words = cfg.copy(), [typed_words.in_hydras_grammar(override) for override in overrides]
    for override, word in zip(OverridesParser.create().parse_overrides(words), words, strict=True):
        changes_keys = override.is_delete() or override.is_add() or override.package
        is_read_later = override.key_or_group in trainer_arguments.READ_KEYS or "ckpt=" in word
        names_code = isinstance(override.value(), dict) or typed_words.CODE_KEYS.search(word)
        if changes_keys or is_read_later or names_code:
            return None
        try:
            OmegaConf.update(copy, override.key_or_group, override.value())
        except OmegaConfBaseException:
            return None
    return copy


def config_groups(configs: Path | None = None) -> dict[str, list[str]]:
    """Return the config groups, folders of `configs/`, and the choices each offers: its files."""
    folders = sorted(filter(Path.is_dir, (configs or CONFIGS).iterdir()))
    return {folder.name: sorted({file.stem for file in folder.glob("*.yaml")} - {"base"}) for folder in folders}


def initialize_hydra(configs: Path) -> initialize_config_dir:
    """Return the context in which Hydra composes the files of `configs/`, and the defaults that hpc has."""
    defaults.register(configs)
    return initialize_config_dir(str(configs), version_base="1.3")


def _compose_typed(words: list[str]) -> DictConfig:
    """Return the config of these words, each with or without a plus, together with the config of Hydra itself."""
    while True:
        try:
            return hydra_compose("train", words, return_hydra_config=True)
        except ConfigCompositionException as error:
            repaired = typed_words.without_needless_plus(words, error)
            others = [word for word in words if not typed_words.sets_value(word)]
            if str(error).startswith("Could not override") and len(others) < len(words):
                repaired = typed_words.with_plus_for_arguments(words, _compose_typed(others))
            if repaired == words:
                raise
            words = repaired


def _check_cluster_name(cfg: DictConfig, choice: str) -> None:
    """Raise `ConfigError` unless a cluster has the name of its file: env.sh and jobs find NAME.sh by it."""
    if (name := OmegaConf.select(cfg, "cluster.name", default=None)) != choice:
        rule = f"must be the name of the cluster's file, {choice}.yaml"
        raise ConfigError("cluster.name", name, rule, f"name: {choice} in configs/cluster/{choice}.yaml")


def _default_name(choices: Mapping[str, str | None]) -> str:
    """Return the name of a run: the choices of data and model, each word once, e.g. digits_resnet."""
    chosen = [(choices.get(group) or "").rpartition("/")[2] for group in ("data", "model")]
    words = re.findall(r"[A-Za-z0-9.+-]+", "_".join(chosen))
    return "_".join(dict.fromkeys(words)) or "run"


def _unknown_key_error(key: str, overrides: Sequence[str], *, configs: Path) -> ConfigError:
    """Return the error of a key that the config does not have. Where the class takes any, it says `+key=value`."""
    from hpc.config import signatures

    others = [override for override in overrides if override.partition("=")[0] != key]
    cfg = compose_overrides(others if len(others) < len(overrides) else [], configs=configs)
    above, _, last = key.rpartition(".")
    target = OmegaConf.select(cfg, f"{above}._target_", default=None) if above else None
    rule = "must be a group or a key of configs/ (+key=value adds a key)"
    fix = suggest_key(key, [*flatten(cfg), *config_groups(configs)])
    with suppress(ConfigError):
        if isinstance(target, str):
            signature = signatures.read_signature(target)
            if not signature.accepts_any:
                return signatures.unknown_argument_error(above, last, target=target, signature=signature)
            rule = f"must have a plus, as {target} takes any argument and a wrong name would not be noticed"
            fix = f"+{next((word for word in overrides if word not in others), key)}"
    return ConfigError(key, None, rule, fix)


def _raise_config_error(error: HydraException, overrides: Sequence[str], *, configs: Path) -> NoReturn:
    """Raise the `ConfigError` that says what one of Hydra's errors means."""
    text = str(error)
    if isinstance(error, OverrideParseException):
        key, _, value = str(error.override).partition("=")
        quoted = value.replace("\\", "\\\\").replace('"', '\\"')
        fix = f"""'{key}="{quoted}"'"""
        if value.startswith("[") or key == "cluster.options":
            fix = format_list_override(key, value)
        rule = "must be key=value as Hydra reads it"
        raise ConfigError(str(error.override), None, rule, f"quote the value: {fix}") from None
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, choice = error.missing_cfg_file.replace(".yaml", "").rpartition("/")
        choices = config_groups(configs).get(group, [])
        fix = f"{group}={closest_word(choice, choices, 'one of them')}"
        if group == "cluster":
            fix += f", or add configs/cluster/{choice}.yaml, like those there"
        raise ConfigError(group or choice, choice, f"must be one of {', '.join(choices)}", fix) from None
    if match := re.search(r"Ambiguous value for argument '([^']*)'", text):
        rule = "must be one value; several values are several runs, or one list"
        fix = "python submit.py --multirun ... for several runs, or key=[a,b] for a list"
        raise ConfigError(match[1], None, rule, fix) from None
    if match := re.search(r"Could not override '([^']+)'", text):
        key = match[1]
        raise _unknown_key_error(key, overrides, configs=configs)
    cause = error.__cause__ or error
    key = " ".join(overrides) or "configs/train.yaml"
    rule = f"Hydra cannot compose a config: {str(cause).splitlines()[0]}"
    raise ConfigError(key, None, rule, "--help, which lists all groups and their choices") from None
