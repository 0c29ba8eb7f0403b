"""Bring the research in ports/ to a baked project, and try all that the project promises. port_table.py tries it all.

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
from typing import Any

import extra_packages
import yaml
from slurm_project import Desk, wait_for

HERE = Path(__file__).resolve().parent
PORTS = HERE / "ports"
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
ON_SLURM = ["cluster=test", "trainer.precision=32-true", "callbacks=witness", "callbacks.witness.fault=hold"]
ON_SLURM += ["checkpoint.every_n_steps=1"]
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
class Ports:
    """A baked project with all ports in it, and a process that starts ranks.

    Attributes:
        runs: the folder of run directories.
    """

    project: Path
    runs: Path

    def __post_init__(self) -> None:
        self.data = self.runs / "data"
        self.data.mkdir(parents=True, exist_ok=True)
        (self.project / "tests").mkdir(exist_ok=True)
        shutil.copy(HERE / "hpc" / "ranks.py", self.project / "tests" / "ranks.py")
        for name in DATA:
            for file in (PORTS / name).glob("research_*.py"):
                shutil.copy(file, self.project / "src" / file.name)
            for group in ("model", "data"):
                shutil.copy(PORTS / name / f"{group}.yaml", self.project / "configs" / group / f"{name}.yaml")
        for name, node in CALLBACKS.items():
            node = node | {"_target_": f"lightning.pytorch.callbacks.{node['_target_']}"}
            text = yaml.safe_dump({"defaults": ["default"], name: node})
            (self.project / "configs" / "callbacks" / f"{name}.yaml").write_text(text)
        self.environ = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
        self.environ |= extra_packages.ENVIRON
        self.ranks: Any = None

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
            subprocess.run(command, check=True, capture_output=True, env=self.environ, cwd=PORTS / name)
        return [f"model={name}", f"data={name}", *DATA[name].format(folder).split(), *QUIET]

    def start(self, run: str, words: list[str], *, num_ranks: int, stop_at: int | None = None) -> tuple[list[int], str]:
        """Start a run on some ranks, or resume it. Return their exit codes and what they printed."""
        if self.ranks is None:
            self.ranks = subprocess.Popen(
                [sys.executable, str(self.project / "tests" / "ranks.py")],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self.environ, cwd=self.project,
            )  # fmt: skip
        log = self.runs / f"{run}.log"
        before = log.stat().st_size if log.exists() else 0
        words = [*words, f"run_dir={self.runs / run}", "trainer.accelerator=cpu", f"trainer.devices={num_ranks}"]
        if (self.runs / run / "config.yaml").exists():
            words = [f"resume={self.runs / run}"]
        start = {"log": str(log), "words": words, "ranks": num_ranks, "stop_at": stop_at}
        self.ranks.stdin.write(json.dumps(start) + "\n")
        self.ranks.stdin.flush()
        codes = json.loads(self.ranks.stdout.readline())
        return codes, log.read_bytes()[before:].decode(errors="replace")

    def run_dir(self, name: str, layout: str, end: str = "") -> Path:
        return self.runs / f"{name}-{layout.replace(' ', '-')}{end}"

    def train(self, name: str, layout: str) -> str:
        """Train a port. Return "" or what went wrong."""
        num_ranks, words = LAYOUTS[layout]
        run = self.run_dir(name, layout).name
        codes, output = self.start(run, [*self.words(name), *words], num_ranks=num_ranks)
        return "" if set(codes) == {0} else _last_words(output, codes)

    def resume(self, name: str, layout: str, *, stop_at: int) -> str:
        """Stop a port in mid-epoch and resume it, after `train`. Return "" or the first difference."""
        num_ranks, words = LAYOUTS[layout]
        whole, run = (self.run_dir(name, layout, end).name for end in ("", "-stopped"))
        words = [*self.words(name), *words]
        codes, output = self.start(run, words, num_ranks=num_ranks, stop_at=stop_at)
        if "stopped at step" not in output:
            return f"it did not stop: {_last_words(output, codes)}"
        codes, output = self.start(run, words, num_ranks=num_ranks)
        if set(codes) != {0}:
            return _last_words(output, codes)
        command = [sys.executable, str(HERE / "same_run.py"), self.project, self.runs / whole, self.runs / run]
        compared = subprocess.run(command, capture_output=True, text=True, env=self.environ)
        return compared.stdout.strip() or compared.stderr[-500:].strip()

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
        job, _ = desk.submit(*self.words(name), *layout, *ON_SLURM, f"run_dir={run_dir}", HF_HUB_OFFLINE="1")
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
        return subprocess.run(command, capture_output=True, text=True, env=self.environ, cwd=self.project)

    def close(self) -> None:
        if self.ranks is not None:
            self.ranks.stdin.close()
            self.ranks.wait(timeout=60)


def _last_words(output: str, codes: list[int]) -> str:
    lines = [line for line in output.splitlines() if "Error" in line] or output.strip().splitlines()[-1:] or [""]
    return f"exit codes {codes}: {lines[-1][:300]}"
