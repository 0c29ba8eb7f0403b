"""The config that a run directory keeps, and the words that made it: read, written once, replaced when a run moves."""

import json
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from hpc.config import trust
from hpc.config.errors import ConfigError
from hpc.config.freezing import to_frozen_yaml
from hpc.config.sections import RunConfig
from hpc.run import allowed_changes, claim, directory, saved_config
from hpc.run.changes import _may_change, changes, reject_other
from hpc.system import files
from hpc.system.files import write_atomically


def load(run_dir: Path) -> DictConfig:
    """The frozen config of a run that this code can go on with. Raises `ConfigError` where there is none."""
    old = saved_config.load(run_dir)
    ours, its = {field.name for field in fields(RunConfig)}, set(map(str, old))
    if ours != its:
        differs = ", ".join(f"{key} is {'new here' if key in ours else 'unknown'}" for key in sorted(ours ^ its))
        rule = f"another version of this project made it: {differs}"
        command = f"python {run_dir}/code/{Path(sys.argv[0]).name} resume={run_dir}"
        fix = command if (run_dir / "code").is_dir() else f"the code that made it: see {run_dir}/made_by.json"
        raise ConfigError("resume", run_dir, rule, fix, only_this_rank=True)
    trust.reject_untrusted(old, run_dir)
    return old


def at_home(run_dir: Path, old: DictConfig) -> bool:
    """Is it still the directory that its config names? Not so after mv or cp: its paths lead to the old place."""
    named = Path(str(old.run_dir or run_dir))
    return named == run_dir or (named.exists() and named.samefile(run_dir))


def said(run_dir: Path, words: Sequence[str]) -> list[str]:
    """The words that were typed for the run, then these. Of a word, or a `+key=`, that comes again the last counts.

    Raises:
        ConfigError: it is not known what was typed.
    """
    path = run_dir / "overrides.json"
    try:
        saved = files.parse_json(files.read_text(path))
        if not isinstance(saved, list) or not all(isinstance(word, str) for word in saved):
            raise ValueError("no list of words")
    except (OSError, ValueError) as error:
        rule = f"what was typed for this run is not known, so it cannot be composed anew: {path}: {error}"
        fix = f'resume={run_dir} alone, at its old place; or write the words there, ["trainer=ddp", "seed=1"], say'
        raise ConfigError("resume", run_dir, rule, fix, only_this_rank=True) from None
    added = {word.partition("=")[0] for word in words if word.startswith("+")}  # Hydra rejects to add a key twice
    return [word for word in saved if word not in words and word.partition("=")[0] not in added] + list(words)


def begin(run_dir: Path, cfg: DictConfig, words: Sequence[str]) -> None:
    """As `keep`, for a new run that others may be about to begin in this directory, too: one of them does.

    Raises:
        ConfigError: there is a run already.
    """
    aside = run_dir / f".config.yaml.{socket.gethostname()}-{os.getpid()}.part"
    aside.write_text(to_frozen_yaml(cfg), encoding="utf-8")
    try:
        if not claim.link(aside, run_dir / "config.yaml"):
            directory.reject_used(run_dir)
    finally:
        aside.unlink()
    write_atomically(run_dir / "overrides.json", json.dumps(list(words), indent=1))


def keep(run_dir: Path, cfg: DictConfig, words: Sequence[str]) -> Callable[[], None] | None:
    """Leave config.yaml and overrides.json as this config and these words say; of a moved run, tell what changes.

    One process calls it. Where nothing changes nothing is written; what is replaced stays as config-1.yaml, and so on.
    What is returned takes a move back that turns out to be impossible: the run goes on as it was.

    Raises:
        ConfigError: the directory holds a run of other science.
    """
    path = run_dir / "config.yaml"
    if not path.exists():
        write_atomically(run_dir / "overrides.json", json.dumps(list(words), indent=1))
        write_atomically(path, to_frozen_yaml(cfg))
        return None
    reject_other(run_dir, cfg)
    if cfg.resume_allow:
        allowed_changes.grant(run_dir, list(cfg.resume_allow))
    if not (lines := changes(run_dir, cfg)):
        return None
    known = [word for word in said(run_dir, words) if not _permits(word)]
    sys.stderr.write("".join(f"{line}\n" for line in lines))
    if cfg.resume_allow:
        allowed_changes.note(run_dir, [line for line in lines if not _may_change(line.partition(":")[0])])
    (run_dir / "verdict").unlink(missing_ok=True)  # it judges the run as it was
    before = {file: files.read_text(file) for file in (run_dir / "overrides.json", path)}
    write_atomically(run_dir / "overrides.json", json.dumps(known, indent=1))
    older = next(name for k in range(1, 10**6) if not (name := run_dir / f"config-{k}.yaml").exists())
    write_atomically(older, before[path])
    write_atomically(path, to_frozen_yaml(OmegaConf.merge(cfg, {allowed_changes.KEY: []})))  # type: ignore[arg-type]
    reads = any(line.startswith("group_readable:") for line in lines)
    if reads:
        _let_group_in(run_dir, cfg.group_readable)

    def take_back() -> None:
        if reads:
            _let_group_in(run_dir, not cfg.group_readable)
        for file, text in before.items():
            write_atomically(file, text)
        older.unlink(missing_ok=True)

    return take_back


def _let_group_in(run_dir: Path, group_readable: bool) -> None:
    from hpc.run import group_access  # seldom asked for

    group_access.let_in(run_dir, group_readable)


def _permits(word: str) -> bool:
    return word.partition("=")[0].lstrip("+") == allowed_changes.KEY
