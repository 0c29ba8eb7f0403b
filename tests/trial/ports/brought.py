"""Bring the research in tests/ports to a baked project, and try all that the project promises.

Each port is written as its authors would write it, and has a model.yaml and a data.yaml.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import extra_packages
import yaml
from slurm_project import Desk, wait_for

from trial.program import AT_ONCE, FIXED, Program, run
from trial.project import TESTS, apart, warm
from trial.same import differences
from trial.strike import Strike

PORTS = TESTS / "ports"
# Where a port's data.yaml wants its data.
DATA = {
    "contrastive": "data.data_dir={}",
    "diffusion": "",
    "gan": "data.data_dir={}",
    "gpt2": "data.data_dir={}",
    "graphs": "data.root={}",
    "mnist": "data.data_dir={}",
    "segmentation": "data.root={}",
    "series": "data.train_file={0}/train.pkl data.val_file={0}/val.pkl data.test_file={0}/test.pkl",
    "unet": "data.path={}/fields.h5",
}
NO_BAR = "+trainer.enable_progress_bar=false"
QUIET = ["callbacks.progress=null", NO_BAR, "callbacks.monitor=null"]
QUIET += ["trainer.log_every_n_steps=1", "trainer.max_epochs=2"]
# Two tasks on Slurm. The second holds in mid-epoch, so that both are there to be killed.
HELD_ON_SLURM = ["cluster=test", "trainer.precision=32-true", "callbacks=witness", "callbacks.witness.fault=hold"]
HELD_ON_SLURM += ["checkpoint.every_n_steps=1"]
TWO_TASKS = ("trainer=ddp", "trainer.devices=2")
LAYOUTS = {"one process": (1, []), "ddp on two": (2, ["strategy=ddp"]), "fsdp on two": (2, ["strategy=fsdp"])}


# Callbacks of Lightning, with arguments by which a short run is affected.
CALLBACKS = {
    "ema": {"_target_": "EMAWeightAveraging", "decay": 0.9},
    "early_stopping": {"_target_": "EarlyStopping", "monitor": "val/loss", "patience": 3},
    "summary": {"_target_": "ModelSummary", "max_depth": 2},
    "learning_rates": {"_target_": "LearningRateMonitor"},
    "swa": {"_target_": "StochasticWeightAveraging", "swa_lrs": 0.01, "swa_epoch_start": 1},
    "unfreezing": {"_target_": "BackboneFinetuning", "unfreeze_backbone_at_epoch": 1},
    "accumulation": {"_target_": "GradientAccumulationScheduler", "scheduling": {0: 1, 1: 2}},
    "device_stats": {"_target_": "DeviceStatsMonitor", "cpu_stats": True},
    "rich_progress": {"_target_": "RichProgressBar", "leave": True},
}


@dataclass
class Brought:
    """A baked project with all ports in it.

    Attributes:
        runs: the folder of run directories.
    """

    project: Path
    runs: Path

    def __post_init__(self) -> None:
        self.data = self.runs / "data"
        self.data.mkdir(parents=True, exist_ok=True)
        for name in DATA:
            for file in (PORTS / name).glob("research_*.py"):
                shutil.copy(file, self.project / "src" / file.name)
            for group in ("model", "data"):
                shutil.copy(PORTS / name / f"{group}.yaml", self.project / "configs" / group / f"{name}.yaml")
        for name, node in CALLBACKS.items():
            node = node | {"_target_": f"lightning.pytorch.callbacks.{node['_target_']}"}
            text = yaml.safe_dump({"defaults": ["default"], name: node})
            (self.project / "configs" / "callbacks" / f"{name}.yaml").write_text(text)
        self.environ = dict(extra_packages.ENVIRON)  # beside `FIXED`
        sys.path.append(str(extra_packages.FOLDER))  # for what is forked from here
        warm()

    @property
    def everything(self) -> dict[str, str]:
        """The environment of a program that is not forked."""
        return os.environ | FIXED | self.environ

    def words(self, name: str) -> list[str]:
        """Return the words of a port, whose data are made when they are needed first.

        Another name is that of a callback, which is added to the default experiment.
        """
        if name not in DATA:
            limits = ["+trainer.limit_train_batches=6", "+trainer.limit_test_batches=1"]
            quiet = [word for word in QUIET if word != NO_BAR or name != "rich_progress"]
            return [f"callbacks={name}", *limits, *quiet]
        folder = self.data / name
        if DATA[name] and not folder.exists():
            command = [sys.executable, str(PORTS / name / "make_data.py"), str(folder)]
            subprocess.run(command, check=True, capture_output=True, env=self.everything, cwd=PORTS / name)
        return [f"model={name}", f"data={name}", *DATA[name].format(folder).split(), *QUIET]

    def start(self, name: str, words: list[str], *, num_ranks: int, strike: Strike | None = None) -> Program:
        """Start a run on some ranks, or resume it, and wait for its end."""
        run_dir = self.runs / name
        words = [*words, f"run_dir={run_dir}", "trainer.accelerator=cpu", f"trainer.devices={num_ranks}"]
        if (run_dir / "config.yaml").exists():
            words = [f"resume={run_dir}"]
        log = self.runs / f"{name}.log"
        started = Program(self.project, ["train.py", *words], log, ranks=num_ranks, strike=strike, patch=AT_ONCE)
        started.environ, started.deadline = self.environ, 180.0
        run(started)
        return started

    def run_dir(self, name: str, layout: str, end: str = "") -> Path:
        return self.runs / f"{name}-{layout.replace(' ', '-')}{end}"

    def train(self, name: str, layout: str) -> str:
        """Train a port. Return "" or what went wrong."""
        num_ranks, words = LAYOUTS[layout]
        started = self.start(self.run_dir(name, layout).name, [*self.words(name), *words], num_ranks=num_ranks)
        return "" if set(started.codes) == {0} else _last_words(started.said(), started.codes)

    def resume(self, name: str, layout: str, *, stop_at: int) -> str:
        """Stop a port in mid-epoch and resume it, after `train`. Return "" or the first difference."""
        num_ranks, words = LAYOUTS[layout]
        whole, stopped = (self.run_dir(name, layout, end) for end in ("", "-stopped"))
        words, strike = [*self.words(name), *words], Strike("training_step", "SIGUSR1", stop_at + 1, num_ranks - 1)
        first = self.start(stopped.name, words, num_ranks=num_ranks, strike=strike)
        if "stopped at step" not in first.said():
            return f"it did not stop: {_last_words(first.said(), first.codes)}"
        again = self.start(stopped.name, words, num_ranks=num_ranks)
        if set(again.codes) != {0}:
            return _last_words(again.said(), again.codes)
        return "; ".join(apart(differences, whole, stopped, project=self.project)[:10])

    def plan(self, name: str) -> str:
        """Plan a port. Return "traced", "on real samples", "by parameters", or what went wrong."""
        done = self.command("plan.py", "--json", *self.words(name))
        if done.returncode != 0:
            return _last_words(done.stdout + done.stderr, [done.returncode])
        plan = json.loads(done.stdout)
        if any("measured on real samples" in note for note in plan["notes"]):
            return "on real samples"
        return "by parameters" if plan["by_parameters"] else "traced"

    def report(self, name: str, layout: str) -> str:
        """Report on a port, after `train`. Return "" or what went wrong."""
        run_dir = self.run_dir(name, layout)
        done = self.command("report.py", str(run_dir))
        is_reported = "finished" in done.stdout and (run_dir / "report.html").exists()
        return "" if is_reported else _last_words(done.stdout + done.stderr, [done.returncode])

    def submit(
        self, name: str, desk: Desk, *, layout: Sequence[str] = TWO_TASKS, killed: Sequence[int] = (0, 1)
    ) -> str:
        """Submit a port to Slurm, kill ranks in mid-epoch, and wait for its end. Return "" or what went wrong."""
        run_dir = self.run_dir(name, f"slurm {layout[0]}")
        words = [*self.words(name), *layout, *HELD_ON_SLURM, f"run_dir={run_dir}"]
        job, _ = desk.submit(*words, HF_HUB_OFFLINE="1", **self.environ)
        wait_for(lambda: [*run_dir.glob("checkpoints/step-*[0-9]/manifest.json")], 90, f"{run_dir} has a checkpoint")
        ranks = [json.loads((run_dir / f"rank-{rank}.json").read_text()) for rank in killed]
        (run_dir / "go").touch()
        for rank in ranks:
            desk.slurm.exec(rank["host"], "kill", "-9", str(rank["pid"]))
        ended = desk.ended(job, 240)
        events = [json.loads(line) for line in (run_dir / "attempts.jsonl").read_text().splitlines()]
        starts = [event["from_step"] for event in events if event["event"] == "start"]
        is_survived = ended.state == "COMPLETED" and len(starts) == 2 and starts[1] > 0
        return "" if is_survived else f"{ended.state}, started at steps {starts}: {_last_words(ended.log, [])}"

    def command(self, program: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the project."""
        command = [sys.executable, program, *words]
        return subprocess.run(command, capture_output=True, text=True, env=self.everything, cwd=self.project)


def _last_words(output: str, codes: list[int]) -> str:
    lines = [line for line in output.splitlines() if "Error" in line] or output.strip().splitlines()[-1:] or [""]
    return f"exit codes {codes}: {lines[-1][:300]}"
