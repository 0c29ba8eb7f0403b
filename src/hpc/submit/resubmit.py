"""Queue a submitted run again: with its own script and code, or with a new script if its resources change."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import Popen
from tempfile import TemporaryDirectory

from omegaconf import DictConfig

from hpc.config import arguments, compose
from hpc.config.errors import ConfigError
from hpc.config.parse import parse
from hpc.config.sections import Config
from hpc.run import changes, directory, frozen_config
from hpc.submit import duplicate_jobs
from hpc.submit.feasibility import reject_impossible_job
from hpc.submit.options import SubmitOptions
from hpc.submit.queue_run import prepare_submission, reject_too_big
from hpc.submit.scripts import (
    make_job,
    read_work_dir,
    reject_run_with_fixed_script,
    render_script,
    renew_environment,
    write_job_script,
)
from hpc.submit.submission import exit_if_job_failed, submit_and_report
from hpc.system import files


def resubmit(node: DictConfig, run_dir: Path, *, words: Sequence[str], options: SubmitOptions) -> None:
    """Queue the job of a run directory again. With --wait, exit with the job's exit code.

    Args:
        node: the run's own config, with the overrides that are typed now.
        words: these overrides; some of them, such as trainer.num_nodes, need a new job script.
    """
    cfg = parse(node, for_job=True)
    reject_not_submitted(run_dir)
    differences, overrides = frozen_config.list_changes(run_dir, cfg.node), compose.select_overrides(words)
    if differences:
        reject_run_with_fixed_script(run_dir)
        os.chdir(read_work_dir(run_dir))  # the run's relative paths keep their meaning
        arguments.check_files(cfg, awaited=options.awaited.run_dirs if options.awaited else ())
        reject_too_big(cfg, frozen_config.merge_overrides(run_dir, overrides))
    if options.dry_run:
        sys.stderr.write("".join(f"{line}\n" for line in differences))
        script = files.read_text(run_dir / "job.sh", errors="surrogateescape")
        print(render_script(make_job(cfg, run_dir=run_dir), cfg) if differences else script, end="")
        return
    with duplicate_jobs.lock_submission(run_dir):
        duplicate_jobs.reject_queued_run(run_dir)
        prepare_submission(cfg, run_dir / "code", wait=options.wait)
        directory.create_run_dir(run_dir)
        with TemporaryDirectory(dir=run_dir, prefix=".submission-") as staged:
            command = _submit_with_changes(cfg, run_dir, words=overrides, folder=Path(staged), options=options)
    exit_if_job_failed(command, options)


def _submit_with_changes(
    cfg: Config, run_dir: Path, *, words: Sequence[str], folder: Path, options: SubmitOptions
) -> Popen[str]:
    """Submit the job. The files that change are written into `folder`, and take their place once it is accepted."""
    change = frozen_config.prepare_change(run_dir, cfg.node, words=words)
    if frozen_config.list_changes(run_dir, cfg.node):
        write_job_script(make_job(cfg, run_dir=run_dir), cfg, folder=folder)
    else:
        renew_environment(run_dir, folder=folder, venv=Path(sys.prefix))
    scripts = sorted(folder.iterdir())

    def accept() -> None:
        for script in scripts:  # before the config: if this is cut off, the same words are still changes
            script.replace(run_dir / script.name)
        changes.withdraw_permission(run_dir)  # those of a job that never ran
        changes.grant_permission(run_dir, cfg.resume_allow)
        change()

    is_changed = bool(scripts or cfg.resume_allow or changes.read_permission(run_dir))
    script = folder / "job.sh" if (folder / "job.sh") in scripts else run_dir / "job.sh"
    text = files.read_text(script, errors="surrogateescape")
    start = reject_impossible_job(make_job(cfg, run_dir=run_dir), cfg, text)
    change_files = accept if is_changed else None
    return submit_and_report(cfg, run_dir, options=options, start=start, script=script, change=change_files)


def reject_not_submitted(run_dir: Path) -> None:
    """Raise `ConfigError` if submit.py has not made the run directory."""
    if not all((run_dir / name).is_file() for name in ("job.sh", "code/train.py")):
        rule = "must be a run directory that submit.py has made, with job.sh and a copy of the code"
        raise ConfigError("resume", run_dir, rule, f"python train.py resume={run_dir}, in a job")
