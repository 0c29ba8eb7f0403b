"""The config of one command line: of a new run, or of a run that is resumed."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hpc.config import trust
from hpc.config.compose import compose_overrides, make_parser, select_overrides
from hpc.config.errors import ConfigError
from hpc.run import changes, frozen_config, restarts
from hpc.system import home


def compose(description: str | None, argv: Sequence[str]) -> DictConfig:
    """The config for the command line of one run. Raises `ConfigError`."""
    words = make_parser(description)
    words.add_argument("--multirun", "-m", action="store_true", help=argparse.SUPPRESS)
    asked = words.parse_intermixed_args(argv)
    if asked.multirun:
        rule = "one process trains one run; under srun or mpiexec, every rank would start all of them"
        raise ConfigError("--multirun", None, rule, "python submit.py --multirun ..., which makes a job array")
    return composed(asked)


def composed(asked: argparse.Namespace) -> DictConfig:
    """The config for parsed arguments; prints it and exits with 0 if `--cfg job` asks for that.

    Raises:
        ConfigError: a group, choice, key or value that the configs do not know; a run that cannot go on, or not so.
    """
    run_dir, words = resumes(asked.overrides), select_overrides(asked.overrides)
    cfg = resumed(run_dir, words) if run_dir else compose_overrides(words)
    if asked.cfg:
        try:
            print(OmegaConf.to_yaml(cfg, resolve=asked.resolve), end="")
        except OmegaConfBaseException as error:
            raise ConfigError("--resolve", None, str(error).splitlines()[0], "--cfg job without --resolve") from None
        sys.exit(0)
    if run_dir:
        restarts.reject_finished(run_dir, cfg)
    elif cfg.resume_allow:
        rule = "names what may change of a run that goes on; this one is new"
        raise ConfigError("resume_allow", cfg.resume_allow, rule, "remove it, or resume=<a run directory> as well")
    return cfg


def resumes(argv: Sequence[str]) -> Path | None:
    """The run directory that `resume=` names, if it does. Raises `ConfigError` where there are two."""
    found = [word.partition("=")[2] for word in argv if word.startswith("resume=")]
    if len(found) > 1:
        raise ConfigError(f"resume={found[1]}", None, "one run goes on at a time", f"resume={found[0]} alone")
    return home.expand(found[0]).absolute() if found else None


def resumed(run_dir: Path, words: Sequence[str]) -> DictConfig:
    """The config with which a run goes on: its frozen one or, where words are typed, one that is composed anew.

    Raises:
        ConfigError: there is no run that this code can read, or the words ask for other science.
    """
    old = frozen_config.load(run_dir)
    if not words and frozen_config.at_home(run_dir, old):
        return old
    code = run_dir / "code" / "configs"
    new = compose_overrides(frozen_config.said(run_dir, words), configs=code if code.is_dir() else None)
    trust.reject_untrusted(new, run_dir)  # its words and its configs have made it
    elsewhere = next((word for word in words if word.lstrip("+~").startswith("run_dir")), None)
    if elsewhere and (not new.run_dir or not frozen_config.at_home(run_dir, new)):
        raise ConfigError(elsewhere, None, "a run goes on in its own directory", f"resume={run_dir} without it")
    return changes.moved(run_dir, old, new)
