"""A run that goes on, here or elsewhere: on other nodes, with another strategy, but always with the same science.

Knows configs and run directories, not torch. What was typed for a run lies in its overrides.json; to move it, those
words and new ones are composed again, and the result may differ from config.yaml only where `MAY_CHANGE` says so.
"""

import fcntl
import json
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from .. import config, files, launch, rundir, states, trust
from ..config import Finished, Refused, flat, frozen
from ..running import claim, history
from . import permission
from .layout import Run

# What may change while a run goes on: where and how it runs. And what these decide through `${...}`, wherever it is.
MAY_CHANGE = (
    "run_dir", "trainer", "strategy", "cluster", "callbacks", "checkpoint", "faults", "logger", "group_readable",
    "dirty_tree", "force", "profile", "resume_allow", "data.num_workers", "data.num_ahead", "data.stage",
)  # fmt: skip
CANCEL = {"slurm": "scancel", "pbs": "qdel"}


def load(run_dir: Path) -> DictConfig:
    """The frozen config of a run that this code can go on with. Raises `Refused` where there is none."""
    old = config.load(run_dir)
    ours, its = {field.name for field in fields(Run)}, set(map(str, old))
    if ours != its:
        differs = ", ".join(f"{key} is {'new here' if key in ours else 'unknown'}" for key in sorted(ours ^ its))
        rule = f"another version of this project made it: {differs}"
        command = f"python {run_dir}/code/{Path(sys.argv[0]).name} resume={run_dir}"
        fix = command if (run_dir / "code").is_dir() else f"the code that made it: see {run_dir}/made_by.json"
        raise Refused("resume", run_dir, rule, fix, alone=True)
    trust.refuse(old, run_dir)
    return old


def at_home(run_dir: Path, old: DictConfig) -> bool:
    """Is it still the directory that its config names? Not so after mv or cp: its paths lead to the old place."""
    named = Path(str(old.run_dir or run_dir))
    return named == run_dir or (named.exists() and named.samefile(run_dir))


def said(run_dir: Path, words: Sequence[str]) -> list[str]:
    """The words that were typed for the run, then these. Of a word, or a `+key=`, that comes again the last counts.

    Raises:
        Refused: it is not known what was typed.
    """
    path = run_dir / "overrides.json"
    try:
        saved = files.parsed(files.text(path))
        if not isinstance(saved, list) or not all(isinstance(word, str) for word in saved):
            raise ValueError("no list of words")
    except (OSError, ValueError) as error:
        rule = f"what was typed for this run is not known, so it cannot be composed anew: {path}: {error}"
        fix = f'resume={run_dir} alone, at its old place; or write the words there, ["trainer=ddp", "seed=1"], say'
        raise Refused("resume", run_dir, rule, fix, alone=True) from None
    added = {word.partition("=")[0] for word in words if word.startswith("+")}  # Hydra refuses to add a key twice
    return [word for word in saved if word not in words and word.partition("=")[0] not in added] + list(words)


def moved(run_dir: Path, old: DictConfig, new: DictConfig) -> DictConfig:
    """The newly composed config of a run, its science compared with the frozen one.

    Raises:
        Refused: something differs that is not in `MAY_CHANGE` and does not follow from that.
    """
    for key, value in flat(new).items():  # what the data said of themselves
        if value is None and OmegaConf.select(new, f"{key.rpartition('.')[0]}._check_"):
            OmegaConf.update(new, key, OmegaConf.select(old, key))
    _refuse_other_science(run_dir, old, new)
    _refuse_trial(run_dir, old, new)
    new.run_dir = str(run_dir)
    return new


def begin(run_dir: Path, cfg: DictConfig, words: Sequence[str]) -> None:
    """As `keep`, for a new run that others may be about to begin in this directory, too: one of them does.

    Raises:
        Refused: there is a run already.
    """
    aside = run_dir / f".config.yaml.{socket.gethostname()}-{os.getpid()}.part"
    aside.write_text(frozen(cfg), encoding="utf-8")
    try:
        if not claim.link(aside, run_dir / "config.yaml"):
            rundir.refuse_used(run_dir)
    finally:
        aside.unlink()
    put(run_dir / "overrides.json", json.dumps(list(words), indent=1))


def keep(run_dir: Path, cfg: DictConfig, words: Sequence[str]) -> Callable[[], None] | None:
    """Leave config.yaml and overrides.json as this config and these words say; of a moved run, tell what changes.

    One process calls it. Where nothing changes nothing is written; what is replaced stays as config-1.yaml, and so on.
    What is returned takes a move back that turns out to be impossible: the run goes on as it was.

    Raises:
        Refused: the directory holds a run of other science.
    """
    path = run_dir / "config.yaml"
    if not path.exists():
        put(run_dir / "overrides.json", json.dumps(list(words), indent=1))
        put(path, frozen(cfg))
        return None
    refuse_other(run_dir, cfg)
    if cfg.resume_allow:
        permission.grant(run_dir, list(cfg.resume_allow))
    if not (lines := changes(run_dir, cfg)):
        return None
    known = [word for word in said(run_dir, words) if not _permits(word)]
    sys.stderr.write("".join(f"{line}\n" for line in lines))
    if cfg.resume_allow:
        permission.note(run_dir, [line for line in lines if not _may_change(line.partition(":")[0])])
    (run_dir / "verdict").unlink(missing_ok=True)  # it judges the run as it was
    before = {file: files.text(file) for file in (run_dir / "overrides.json", path)}
    put(run_dir / "overrides.json", json.dumps(known, indent=1))
    older = next(name for k in range(1, 10**6) if not (name := run_dir / f"config-{k}.yaml").exists())
    put(older, before[path])
    put(path, frozen(OmegaConf.merge(cfg, {permission.KEY: []})))  # type: ignore[arg-type]
    reads = any(line.startswith("group_readable:") for line in lines)
    if reads:
        _let_group_in(run_dir, cfg.group_readable)

    def take_back() -> None:
        if reads:
            _let_group_in(run_dir, not cfg.group_readable)
        for file, text in before.items():
            put(file, text)
        older.unlink(missing_ok=True)

    return take_back


def _let_group_in(run_dir: Path, group_readable: bool) -> None:
    from .. import group  # seldom asked for

    group.let_in(run_dir, group_readable)


def put(path: Path, text: str) -> None:
    """Write a file whole or not at all: whoever reads it at this moment has the old one."""
    aside = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}.part")  # another may write it, too
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def changes(run_dir: Path, cfg: DictConfig) -> list[str]:
    """`key: old -> new`, a line for each value that differs from the run's config.yaml."""
    before, after = _leaves(config.load(run_dir)), _leaves(cfg)
    differ = [key for key in _differ(before, after) if key != permission.KEY]
    return [f"{key}: {_typed(before, key)} -> {_typed(after, key)}" for key in differ]


def refuse_other(run_dir: Path, cfg: DictConfig) -> None:
    """Raises `Refused` where there is a run of other science."""
    if (run_dir / "config.yaml").exists():
        old = config.load(run_dir)
        _refuse_other_science(run_dir, old, cfg)
        _refuse_trial(run_dir, old, cfg)


def refuse_finished(run_dir: Path, cfg: DictConfig) -> None:
    """Raises `Refused` where the run has come to its end, and this config does not set a later one."""
    try:
        verdict = files.text(run_dir / "verdict", errors="replace")
    except OSError:
        return
    if not re.search(r"(?m)^outcome finished$", verdict):
        return  # it may have failed before there was a config
    old, new = config.load(run_dir).trainer, cfg.trainer
    if any(_limit(new.get(key)) > _limit(old.get(key)) for key in ("max_epochs", "max_steps")):
        return
    more = f"trainer.max_epochs=<more than {old.get('max_epochs')}>"
    if _limit(old.get("max_steps")) < float("inf"):
        more = f"trainer.max_steps=<more than {old.max_steps}>"
    fix = f"resume={run_dir} {more}, or a new run from its weights: ckpt={run_dir}/checkpoints/last.ckpt"
    again = _whole(os.environ.get("SLURM_RESTART_COUNT")) or _is_of_this_batch_job(run_dir, os.environ)
    raise (Finished if again else Refused)("resume", run_dir, "the run is finished", fix)


def goes_on(run_dir: Path, words: Sequence[str], who: Mapping[str, Any], environ: Mapping[str, str]) -> bool:
    """Is there a run of this job that the scheduler has started again, and not another one that the job started?

    Args:
        who: this process, as its claim would name it.
    """
    # PBS does not tell a job that it was started again: there the same words are the same run.
    again = claim.of_earlier_start(run_dir, who) or _is_of_this_batch_job(run_dir, environ)
    try:
        return again and json.loads((run_dir / "overrides.json").read_text(encoding="utf-8")) == list(words)
    except FileNotFoundError:  # it came to nothing before
        return again
    except (OSError, ValueError):
        return False


def _is_of_this_batch_job(run_dir: Path, environ: Mapping[str, str]) -> bool:
    """Of PBS."""
    job, batch = launch.job_id(environ), environ.get("PBS_ENVIRONMENT") == "PBS_BATCH"
    return batch and any(event.get("job") == job for event in rundir.events(run_dir))


def _whole(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0


@contextmanager
def alone(run_dir: Path) -> Iterator[None]:
    """Of several `submit.py resume=` of one run at once, one asks the scheduler and hands the job over.

    Where nothing can be written, or the storage knows no locks, each goes on; the former is told in another place.

    Raises:
        Refused: another one is at it.
    """
    with ExitStack() as held:
        try:
            # It is never replaced by another file. A member of an array has none yet.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            lock = os.open(run_dir / "submitted.json", flags, 0o640)
            held.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel gives it back, however this process ends
        except BlockingIOError:
            rule = "another submit.py hands a job of this run over just now; two jobs cannot go on with one run"
            raise Refused("resume", run_dir, rule, f"wait a moment, then: python report.py {run_dir}") from None
        except OSError:
            pass
        yield


def refuse_queued(run_dir: Path) -> None:
    """Raises `Refused` where the scheduler has a job of this run. One that does not answer is not waited for."""
    run = history.read(run_dir, run_dir.name)
    scheduler = run.submitted.get("scheduler")
    if scheduler not in states.COMMAND or not run.jobs:
        return
    told = states.ask(scheduler, run.jobs, {run.owner}) or {}
    active = [job for job in run.jobs if job in told and told[job].active]  # not another member of the array
    if active:
        rule = f"its job {active[0]} is {told[active[0]].word}; two jobs cannot go on with one run"
        raise Refused("resume", run_dir, rule, f"wait for job {active[-1]}, or {CANCEL[scheduler]} {' '.join(active)}")


def _refuse_other_science(run_dir: Path, old: DictConfig, new: DictConfig) -> None:
    before, after = _leaves(old), _leaves(_as_it_ran(old, new))
    differ = [key for key in _differ(before, after) if not _may_change(key)]
    if not differ:
        return
    raw = flat(new)
    key = min(differ, key=lambda key: "${" in str(raw.get(key)))  # what is written before what follows from it
    its, asked = _typed(before, key), _typed(after, key)
    rule = f"the run has {its}; it must go on with the same science, but for what you name in {permission.KEY}"
    mean = "" if key in permission.NEVER else f"{key}={asked} {permission.KEY}=[{key}] if you mean it, or "
    fix = f"{key}={its}, or {mean}a new run from its weights: {key}={asked} ckpt={run_dir}/checkpoints/last.ckpt"
    raise Refused(key, asked, rule, fix)


def _refuse_trial(run_dir: Path, old: DictConfig, new: DictConfig) -> None:
    """Raises `Refused` where a few batches are asked for to try a run: Lightning would take them for its end."""
    key = "fast_dev_run"
    before, asked = old.trainer.get(key), new.trainer.get(key)
    if asked and asked != before:
        rule = "must stay off while a run goes on: it tries a few batches, and the run would be finished then"
        fix = f"a new run, so without resume={run_dir}; or resume={run_dir} without trainer.{key}"
        raise Refused(f"trainer.{key}", asked, rule, fix)


def _as_it_ran(old: DictConfig, new: DictConfig) -> DictConfig:
    """The new config, but for what may change: so what follows from that is as it was, too."""
    cfg = new.copy()
    with open_dict(cfg):
        for key in (*MAY_CHANGE, *permission.keys(old, new)):
            above, _, last = key.rpartition(".")
            here, there = (OmegaConf.select(some, above) if above else some for some in (cfg, old))
            if here is not None:
                here.pop(last, None)
            if here is not None and there is not None and last in there:
                here[last] = there[last]
    return cfg


def _leaves(cfg: DictConfig) -> dict[str, Any]:
    """All values as config.yaml holds them. Raises `Refused` where a reference leads nowhere."""
    try:
        return flat(OmegaConf.create(frozen(cfg)))
    except OmegaConfBaseException as error:
        raise Refused(error.full_key or "resume", None, str(error).splitlines()[0], "see --cfg job") from None


def _permits(word: str) -> bool:
    return word.partition("=")[0].lstrip("+") == permission.KEY


def _may_change(key: str) -> bool:
    return any(key == part or key.startswith(f"{part}.") for part in MAY_CHANGE)


def _differ(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [key for key in before | after if (key in before, before.get(key)) != (key in after, after.get(key))]


def _typed(leaves: dict[str, Any], key: str) -> str:
    """A value as one would type it."""
    value = leaves.get(key, "(nothing)")
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _limit(value: object) -> float:
    """Of epochs or steps; none is null or -1 to Lightning."""
    return value if isinstance(value, int) and value >= 0 else float("inf")
