"""Write a job script for each trainer preset: `sbatch slurm/ddp_4node.sbatch` (or qsub) starts a run."""

from collections.abc import Sequence
from pathlib import Path

from hpc.config import compose
from hpc.config.errors import ConfigError
from hpc.config.parse import parse
from hpc.jobs import job
from hpc.submit.scripts import render_script


def write_preset_scripts(folder: Path, words: Sequence[str], *, dry_run: bool = False) -> None:
    """Write a script per preset into `folder` and print the file names.

    The scripts hold no run directory, and no account unless `words` gives one.

    Args:
        words: overrides as typed; default: cluster=slurm.
    """
    overrides = list(words) or ["cluster=slurm"]
    if dry_run:
        raise ConfigError(
            "--render", folder, "cannot be combined with --dry-run, which writes nothing", "leave one out"
        )
    if word := next((word for word in overrides if word.startswith("trainer=")), None):
        rule = "cannot be combined with --render, which writes a script for each preset of the trainer"
        raise ConfigError(word, None, rule, "leave it out")
    scripts = {}
    for preset in compose.config_groups()["trainer"]:
        if preset == "cpu":
            continue
        arguments = (f"trainer={preset}", *overrides)
        node = compose.compose_overrides(["cluster.account=null", *arguments], personal=False)
        if node.run_dir:
            rule = "cannot be given with --render: a script may be submitted many times, and each job makes its own"
            raise ConfigError("run_dir", node.run_dir, rule, "leave it out, or submit.py without --render")
        cfg = parse(node)
        name = f"{preset}.{'pbs' if cfg.cluster.scheduler == 'pbs' else 'sbatch'}"
        scripts[folder / name] = render_script(job.job_from_config(cfg, arguments), cfg)
    folder.mkdir(parents=True, exist_ok=True)
    for file, script in scripts.items():
        file.write_text(script, encoding="utf-8")
        print(file)
