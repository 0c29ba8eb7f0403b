"""The config that a run directory keeps, and the words that made it: read, written once, replaced when they change."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

from hpc.config import trust
from hpc.config.errors import ConfigError, first_line
from hpc.config.freezing import to_frozen_yaml
from hpc.config.sections import Config
from hpc.config.yaml_files import YAML_ERRORS, load_yaml
from hpc.run import changes, directory
from hpc.system import files
from hpc.system.files import write_atomically


def read(run_dir: Path) -> DictConfig:
    """Return the frozen config of a run. Raises `ConfigError` where there is none that can be read."""
    path = run_dir / "config.yaml"
    weights = f"a new run from the weights that are left: ckpt={run_dir}/checkpoints/last.ckpt"
    if not run_dir.is_dir():
        rule = "must be a run directory, and this is a file" if run_dir.exists() else "must be an existing directory"
        raise ConfigError("resume", run_dir, rule, "resume=<a run directory>", only_this_rank=True)
    if not path.exists():
        rule = "must be a run directory, but it holds no config.yaml: no run was started in it, or it was half deleted"
        fix = f"resume=<a run directory> (of a sweep, one of its runs), or {weights}"
        raise ConfigError("resume", run_dir, rule, fix, only_this_rank=True)
    try:
        cfg = load_yaml(path)
        if not isinstance(cfg, DictConfig) or not cfg:
            raise ValueError("no keys")
    except YAML_ERRORS as error:
        rule = f"must hold a readable config.yaml, but {path} is damaged: {first_line(error)}"
        fix = f"resume=<a run directory>, or {weights}"
        raise ConfigError("resume", run_dir, rule, fix, only_this_rank=True) from None
    name_keys_as_now(cfg)
    OmegaConf.set_struct(cfg, True)
    return cfg


def name_keys_as_now(cfg: DictConfig) -> None:
    """Name the keys of a run of an earlier version as this one does. Modifies cfg.

    `test_only` is `task` now, the lines of `cluster.setup` are a file of the cluster, which jobs source, the scheduler
    knows how long and large a job may be, and the umask says who may read a run. The callback `histograms`, which each
    run had, is gone.
    """
    with open_dict(cfg):
        if "test_only" in cfg and "task" not in cfg:
            cfg.task = "test" if cfg.pop("test_only") else "train"
        if isinstance(cfg.get("cluster"), DictConfig):
            for key in ("setup", "max_time", "max_nodes"):
                cfg.cluster.pop(key, None)
        cfg.pop("group_readable", None)
        if isinstance(cfg.get("callbacks"), DictConfig):
            histograms = cfg.callbacks.get("histograms") or {}
            if str(histograms.get("_target_")) in trust.FORMER_CLASSES:
                cfg.callbacks.pop("histograms")


def read_compatible(run_dir: Path) -> DictConfig:
    """Return the frozen config of a run that this code can resume, with trusted targets only. Raises `ConfigError`."""
    cfg = read(run_dir)
    known_keys, keys = {field.name for field in fields(Config)} - {"node"}, set(map(str, cfg))
    if known_keys != keys:
        lacks, unknown = ", ".join(sorted(known_keys - keys)), ", ".join(sorted(keys - known_keys))
        differences = [f"lacks {lacks}"] * bool(lacks) + [f"has the unknown keys {unknown}"] * bool(unknown)
        rule = f"must be a run of this version of the project, but its config {' and '.join(differences)}"
        command = f"python {run_dir}/code/{Path(sys.argv[0]).name} resume={run_dir}"
        fix = command if (run_dir / "code").is_dir() else f"the code that made the run: see {run_dir}/made_by.json"
        raise ConfigError("resume", run_dir, rule, fix, only_this_rank=True)
    trust.reject_untrusted(cfg, run_dir)
    return cfg


def is_at_configured_path(run_dir: Path, cfg: DictConfig) -> bool:
    """Return whether this is still the directory that its config names.

    It is not after mv or cp, when the paths in the config lead to the old place.
    """
    named = Path(str(cfg.run_dir or run_dir))
    return named == run_dir or (named.exists() and named.samefile(run_dir))


def merge_overrides(run_dir: Path, words: Sequence[str]) -> list[str]:
    """Return the words that were typed for the run, then these. Of a repeated word or `+key=` the last one counts.

    Raises:
        ConfigError: overrides.json, which holds what was typed, cannot be read.
    """
    path = run_dir / "overrides.json"
    try:
        saved = files.parse_json(files.read_text(path))
        if not isinstance(saved, list) or not all(isinstance(word, str) for word in saved):
            raise ValueError("it must hold a list of words")
    except (OSError, ValueError) as error:
        rule = f"must hold the words that were typed for the run, but {path} cannot be read: {error}"
        fix = f'resume={run_dir} alone, at its old place; or write the words there, e.g. ["trainer=ddp", "seed=1"]'
        raise ConfigError("resume", run_dir, rule, fix, only_this_rank=True) from None
    added = {word.partition("=")[0] for word in words if word.startswith("+")}  # Hydra rejects adding a key twice
    return [word for word in saved if word not in words and word.partition("=")[0] not in added] + list(words)


def list_changes(run_dir: Path, cfg: DictConfig) -> list[str]:
    """Return a line `key: old -> new` for each value that differs from the run's config.yaml."""
    return changes.list_changes(read(run_dir), cfg)


def reject_changed_training(run_dir: Path, cfg: DictConfig) -> None:
    """Raise `ConfigError` where the directory holds a run that trains something else."""
    if (run_dir / "config.yaml").exists():
        changes.reject_changed_training(read(run_dir), cfg, run_dir=run_dir)


def create_exclusively(run_dir: Path, cfg: DictConfig, *, words: Sequence[str]) -> None:
    """Write config.yaml and overrides.json of a new run. If several processes try, one of them succeeds.

    Raises:
        ConfigError: there is a run already.
    """
    temporary = files.temporary_path(run_dir / "config.yaml")
    temporary.write_text(to_frozen_yaml(cfg), encoding="utf-8")
    try:
        if not files.link_unless_taken(temporary, run_dir / "config.yaml"):
            directory.reject_used(run_dir)
    finally:
        temporary.unlink()
    write_atomically(run_dir / "overrides.json", json.dumps(list(words), indent=1))


def create_or_replace(run_dir: Path, cfg: DictConfig, *, words: Sequence[str]) -> None:
    """Write config.yaml and overrides.json for this config and these words; print what changes in an existing run.

    One process calls it.

    Raises:
        ConfigError: the directory holds a run that trains something else.
    """
    change = prepare_change(run_dir, cfg, words=words)
    changes.grant_permission(run_dir, cfg.resume_allow)
    change()


def prepare_change(run_dir: Path, cfg: DictConfig, *, words: Sequence[str]) -> Callable[[], None]:
    """Check and print what changes in a run, and return the function that writes it, once it turns out to be possible.

    Raises:
        ConfigError: the directory holds a run that trains something else.
    """
    if not (run_dir / "config.yaml").exists():
        return partial(_write, run_dir, cfg, words)
    reject_changed_training(run_dir, cfg)
    lines = list_changes(run_dir, cfg)
    sys.stderr.write("".join(f"{line}\n" for line in lines))
    merged = [word for word in merge_overrides(run_dir, words) if not _is_resume_allow(word)] if lines else []

    def replace() -> None:
        if cfg.resume_allow:
            permitted = [line for line in lines if not changes.may_change(line.partition(":")[0])]
            changes.record_changes(run_dir, permitted)
        if lines:
            (run_dir / "verdict").unlink(missing_ok=True)  # it is about the run as it was
            _write(run_dir, OmegaConf.merge(cfg, {changes.ALLOW_KEY: []}), merged)  # type: ignore[arg-type]

    return replace


def _write(run_dir: Path, cfg: DictConfig, words: Sequence[str]) -> None:
    write_atomically(run_dir / "overrides.json", json.dumps(list(words), indent=1))
    write_atomically(run_dir / "config.yaml", to_frozen_yaml(cfg))


def _is_resume_allow(word: str) -> bool:
    return word.partition("=")[0].lstrip("+") == changes.ALLOW_KEY
