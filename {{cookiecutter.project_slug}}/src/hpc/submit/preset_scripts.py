"""Write a job script for each preset of the trainer: `sbatch slurm/ddp_4node.sbatch` (or qsub) starts it."""

from collections.abc import Sequence
from pathlib import Path

from hpc.config import compose, preflight
from hpc.config.errors import ConfigError
from hpc.jobs import job
from hpc.submit.scripts import text


def render(folder: Path, words: Sequence[str], *, dry_run: bool = False) -> None:
    """Write the scripts into `folder` and print their names: no run directory, nobody's account unless it is typed."""
    overrides = list(words) or ["cluster=slurm"]
    if dry_run:
        raise ConfigError("--render", folder, "writes a script per preset; --dry-run writes nothing", "one of them")
    if word := next((word for word in overrides if word.startswith("trainer=")), None):
        raise ConfigError(word, None, "--render writes a script for each preset of the trainer", "leave it out")
    scripts = {}
    for preset in compose.groups()["trainer"]:
        if preset == "cpu":
            continue
        typed = (f"trainer={preset}", *overrides)
        cfg = compose.compose_overrides(["cluster.account=null", *typed], personal=False)
        if cfg.run_dir:
            rule = "is of each job's own: such a script is submitted many times"
            raise ConfigError("run_dir", cfg.run_dir, rule, "leave it out, or submit.py without --render")
        preflight.rules(cfg)
        name = f"{preset}.{'pbs' if cfg.cluster.scheduler == 'pbs' else 'sbatch'}"
        scripts[folder / name] = text(job.of(cfg, typed), cfg)
    folder.mkdir(parents=True, exist_ok=True)
    for file, script in scripts.items():
        file.write_text(script, encoding="utf-8")
        print(file)
