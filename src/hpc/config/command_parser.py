"""The command line of every verb: overrides and Hydra's flags, which work as in Hydra or say what to type instead."""

import argparse
import sys
from typing import Any, NoReturn

from hydra import __version__ as hydra_version
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from hpc.config.compose import config_groups, initialize_hydra, select_overrides
from hpc.config.errors import ArgumentParser, ConfigError, first_line, make_printable
from hpc.config.project import CONFIGS
from hpc.config.typed_words import in_hydras_grammar

INFOS = ["all", "config", "defaults", "defaults-tree", "plugins", "searchpath"]
# Flags → rule, and what to type.
REPLACED = {
    ("--config-name", "-cn"): ("cannot be used: each run is of train.yaml", "experiment=NAME, of configs/experiment/"),
    ("--config-path", "-cp"): (f"cannot be used: it is {CONFIGS}", "'hydra.searchpath=[DIR]', which adds a folder"),
    ("--config-dir", "-cd"): ("cannot be used: a resumed run would not find the folder", "'hydra.searchpath=[DIR]'"),
    ("--experimental-rerun",): ("cannot be used: a run keeps its config itself", "resume=<a run directory>"),
    ("--hydra-help",): ("cannot be used: the help of these programs has their flags", "--help"),
}  # fmt: skip


class _Replace(argparse.Action):
    """Raises the `ConfigError` of a flag that another word replaces."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        rule, fix = next(answer for flags, answer in REPLACED.items() if option in flags)
        raise ConfigError(str(option), values or None, rule, fix)


class _Help(argparse.Action):
    """Prints the help, or that of the keys of the config that follow, and exits with 0."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        from hpc.config import documentation  # only here: it reads the sources

        print("\n\n".join(map(documentation.describe, values)) if values else parser.format_help().rstrip("\n"))
        parser.exit()


class ConfigGroupsParser(ArgumentParser):
    """A parser whose help lists the files of configs/. Only `--help` looks them up, not every rank of a job."""

    def format_help(self) -> str:
        """Return the help, with the config groups at its end."""
        lines = [f"  {group}={' | '.join(choices)}" for group, choices in config_groups().items()]
        self.epilog = "\n".join(["config groups (files of configs/):", *lines])
        return super().format_help()


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of what every verb accepts: overrides, `--help`, and Hydra's flags."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = ConfigGroupsParser(description=description, formatter_class=formatter, add_help=False)
    keys_help = "show this help, or what keys of the config mean: --help seed cluster.chain"
    parser.add_argument(
        "--help", "-h", nargs="*", metavar="KEY", action=_Help, default=argparse.SUPPRESS, help=keys_help
    )
    overrides_help = "a choice of a config group, or a value of a key of the config"
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=overrides_help, type=_require_value)
    parser.add_argument("--cfg", "-c", choices=["job"], help="print the composed config and exit")
    parser.add_argument("--resolve", action="store_true", help="with --cfg: show values instead of ${...}")
    parser.add_argument("--package", "-p", metavar="KEY", help="with --cfg: show this part of the config")
    info_help = "print how Hydra composes the config"
    parser.add_argument("--info", "-i", nargs="?", const="all", choices=INFOS, help=info_help)
    install = 'eval "$(python train.py -sc install=bash)" completes groups, choices and keys by TAB'
    parser.add_argument("--shell-completion", "-sc", action="store_true", help=install)
    parser.add_argument("--run", "-r", action="store_true", help=argparse.SUPPRESS)  # what they do anyway
    parser.add_argument("--version", action="version", version=f"Hydra {hydra_version}", help="print Hydra's version")
    for flags in REPLACED:
        parser.add_argument(*flags, nargs="?", action=_Replace, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser


def _require_value(word: str) -> str:
    """Return the word. Raise `ConfigError` if nothing follows `key=`, as in `ckpt=$UNSET`: it would mean null."""
    key, equals, value = word.partition("=")
    if equals and not value:
        choices = config_groups().get(key)
        fix = f"{key}=null for none, '{key}=\"\"' for an empty text, or {key}=<value>"
        fix = "resume=<a run directory>" if key == "resume" else f"{key}={choices[0]}" if choices else fix
        raise ConfigError(word, None, "must have a value; perhaps a variable of the shell is not set", fix)
    return word


def print_info(arguments: argparse.Namespace) -> None:
    """Print what `--info` or `--shell-completion` asks for, and exit with 0; without them, do nothing."""
    if not (arguments.info or arguments.shell_completion):
        return
    words = [in_hydras_grammar(word) for word in select_overrides(arguments.overrides)]
    with initialize_hydra(CONFIGS):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        try:
            if arguments.info:
                hydra.show_info(arguments.info, "train", words)
            else:
                hydra.shell_completion("train", words)
        except Exception as error:  # whatever Hydra says to these words
            flag, rule = "--info" if arguments.info else "-sc", f"cannot be answered: {first_line(error)}"
            raise ConfigError(flag, None, rule, "-sc install=bash, or --info") from None
    sys.exit(0)


def print_config(cfg: DictConfig, arguments: argparse.Namespace) -> NoReturn:
    """Print the config, or the part of it that `--package` names, and exit with 0."""
    package = arguments.package if arguments.package != "_global_" else None
    node = OmegaConf.select(cfg, package) if package else cfg
    if not OmegaConf.is_config(node):
        raise ConfigError("--package", package, "must name a part of the config with keys", "--package trainer")
    header = f"# @package {package}\n" if package else ""
    print(make_printable(header + OmegaConf.to_yaml(node, resolve=arguments.resolve)), end="")
    sys.exit(0)
