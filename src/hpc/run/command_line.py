"""The config of one command line: of a new run, or of a run that is resumed."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from hpc.config import command_parser, trust
from hpc.config.compose import compose_overrides, select_overrides
from hpc.config.errors import ConfigError
from hpc.config.project import HPC
from hpc.run import changes, frozen_config, restarts
from hpc.system import home


def compose(description: str | None, argv: Sequence[str]) -> DictConfig:
    """Return the composed config for the command line of one run. Raises `ConfigError`."""
    argument_parser = command_parser.make_parser(description)
    argument_parser.add_argument("--multirun", "-m", action="store_true", help=argparse.SUPPRESS)
    arguments = argument_parser.parse_intermixed_args(argv)
    if arguments.multirun:
        rule = "cannot be used with train.py: under srun or mpiexec, every rank would start all the runs"
        raise ConfigError("--multirun", None, rule, "python submit.py --multirun ..., which submits a job array")
    return compose_parsed(arguments)


def compose_parsed(arguments: argparse.Namespace) -> DictConfig:
    """Return the composed config for parsed arguments; print it and exit with 0 if `--cfg job` asks for that.

    Raises:
        ConfigError: a group, choice, key or value that the configs do not have; a run that cannot be resumed like this.
    """
    command_parser.print_info(arguments)
    run_dir, words = resume_directory(arguments.overrides), select_overrides(arguments.overrides)
    cfg = compose_resumed(run_dir, words) if run_dir else compose_overrides(words)
    if arguments.cfg:
        try:
            command_parser.print_config(cfg, arguments)
        except OmegaConfBaseException as error:
            rule = f"cannot be used here: {str(error).splitlines()[0]}"
            raise ConfigError("--resolve", None, rule, "--cfg job without --resolve") from None
    if run_dir:
        restarts.reject_finished(run_dir, cfg)
    elif cfg.resume_allow:
        rule = "must be left out of a new run: it names what may change when a run is resumed"
        raise ConfigError("resume_allow", cfg.resume_allow, rule, "remove it, or add resume=<a run directory>")
    return cfg


def resume_directory(argv: Sequence[str]) -> Path | None:
    """Return the run directory that `resume=` names, or None. Raises `ConfigError` where it is given twice."""
    values = [word.partition("=")[2] for word in argv if word.startswith("resume=")]
    if len(values) > 1:
        rule = f"must be given once, but it is given {len(values)} times"
        raise ConfigError("resume", values[1], rule, f"resume={values[0]} alone")
    return home.expand(values[0]).absolute() if values else None


def compose_resumed(run_dir: Path, words: Sequence[str]) -> DictConfig:
    """Return the config with which a run is resumed: the frozen one or, if words are typed, a newly composed one.

    Raises:
        ConfigError: there is no run that this code can read, or the words would change what the run trains.
    """
    old = frozen_config.read_compatible(run_dir)
    if not words and frozen_config.is_at_configured_path(run_dir, old):
        return old
    if (run_dir / "code" / "src" / HPC / "jobs" / "cluster").is_dir():  # where clusters were before
        program = f"{run_dir}/code/{Path(sys.argv[0]).name}"
        rule = "A run that an earlier version has submitted changes with its own code only"
        raise ConfigError("resume", run_dir, rule, f"python {shlex.quote(program)} resume={run_dir}, and these words")
    code = run_dir / "code" / "configs"
    new = compose_overrides(frozen_config.merge_overrides(run_dir, words), configs=code if code.is_dir() else None)
    frozen_config.name_keys_as_now(new)
    if not any(word.startswith("name=") for word in words):
        new.name = old.name  # the default may be another one by now
    with suppress(OmegaConfBaseException):  # what cannot be resolved is reported below
        if new.ckpt and new.ckpt != old.ckpt:
            from hpc.config import run_checkpoint  # only here: few runs have one

            if old.ckpt in run_checkpoint.links_of_run(new.ckpt):
                new.ckpt = old.ckpt  # an earlier version froze the checkpoint that ckpt=RUN_DIR led to
    trust.reject_untrusted(new, run_dir)  # the words and configs in the run directory have made it
    override = next((word for word in words if word.lstrip("+~").startswith("run_dir")), None)
    if override and (not new.run_dir or not frozen_config.is_at_configured_path(run_dir, new)):
        rule = "cannot be given with resume=: a run is resumed in its own directory"
        raise ConfigError(override, None, rule, f"resume={run_dir} without {override}")
    return changes.accept_new_config(old, new, run_dir=run_dir)
