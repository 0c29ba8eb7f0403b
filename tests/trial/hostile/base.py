"""What cases of hostile input copy: a valid run, a search, a study, images and text; and the libraries of programs."""

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

from trial.hostile import kinds

LIBRARIES = [
    "hydra",
    "omegaconf",
    "yaml",
    "torch",
    "lightning",
    "optuna",
    "tensorboard.compat.proto.event_pb2",
    "PIL.Image",
    "torch.distributed.checkpoint",
    "lightning.pytorch.callbacks",
    "torchmetrics",
    "cookiecutter.main",
    "tqdm",
]
MODULES = [
    "config.build",
    "config.arguments",
    "config.trust",
    "launch.node_checks",
    "run.changes",
    "run.command_line",
    "submit.scripts",
    "report.run_table",
    "report.board",
    "studies.search",
    "studies.optuna_study",
    "report.search_results",
    "report.scaling_results",
    "studies.scaling_study",
    "studies.sweep",
    "training.starting_point",
    "training.record",
    "strategies.ddp",
    "strategies.fsdp",
    "checkpoint.trained",
    "checkpoint.weights",
    "plan.trace_cache",
    "plan.memory_check",
    "resume.resume",
]


def prepare(base: Path, project: Path, words: list[str]) -> None:
    """Import the libraries, and make a valid run, a search, images and text."""
    base.mkdir()
    run_dir = base / "run"
    command = [sys.executable, str(project / "train.py"), f"run_dir={run_dir}", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=project)
    assert done.returncode == 0, done.stderr
    (run_dir / "submitted.json").write_text(
        json.dumps(
            {
                "time": 1.0,
                "cluster": "slurm",
                "scheduler": "slurm",
                "argv": [],
                "name": "digits",
                "nodes": 1,
                "gpus_per_node": 0,
                "seconds": 3600,
                "job": "17",
                "jobs": ["17"],
                "error": None,
            }
        )
    )
    (run_dir / "job.sh").write_text('#!/bin/bash\ncd /tmp\npython "$code/train.py"\n')
    (run_dir / "job-17.log").write_text("0: epoch 1\nTraceback (most recent call last):\n  File x\nValueError: y\n")
    (run_dir / "skipped.jsonl").write_text('{"step": 2, "attempt": 1}\n')
    (run_dir / "stalled").write_text("1\n")
    (run_dir / "errors/1").mkdir(parents=True, exist_ok=True)
    (run_dir / "errors/1/rank-0.log").write_text("ValueError: x\n")
    (run_dir / "code").mkdir()
    (run_dir / "code/train.py").write_text("")
    shutil.copytree(
        Path(__file__).resolve().parents[3] / "src/hpc/jobs", run_dir / "code/src/hpc/jobs"
    )  # the file that the job script of a moved run sources
    for library in LIBRARIES:
        importlib.import_module(library)
    for module in MODULES:
        importlib.import_module(f"hpc.{module}")
    shutil.copytree(project / "configs", base / "configs")
    from hpc.config import compose, conversion, signatures

    signatures.remember_all()  # as `source env.sh` does; a draw's home is empty
    kinds.LEAVES[:] = sorted(conversion.flatten(compose.compose_overrides([])))
    kinds.GROUPS |= compose.config_groups()
    _search(base / "search")
    _study(base / "study", run_dir)
    _data(base)
    for module in ("train", "submit"):  # parse them once
        importlib.import_module(module)


def _search(folder: Path) -> None:
    from hpc.studies import optuna_study, search

    words = ["model.optimizer.lr=interval(0.001,0.1)"]
    for number in range(3):
        (folder / f"{number:03}").mkdir(parents=True)
    search.save_search(folder, search.Search("random", 3, 1, "val/loss", "min", words))
    (folder / "submitted.json").write_text(
        '{"time": 1.0, "scheduler": "slurm", "job": "18", "jobs": ["18"], "error": null}'
    )
    for number in range(2):
        optuna_study.draw_member_overrides(folder / f"{number:03}")
        reporter = optuna_study.open_reporter(folder / f"{number:03}")
        assert reporter
        reporter.report(0, 0.5)
        reporter.end("complete", 0.5)
    (folder / "members").write_text("".join(f"{folder}/{number:03}\n" for number in range(3)))


def _study(folder: Path, run_dir: Path) -> None:
    from hpc.studies import scaling_file

    shutil.copytree(run_dir, folder / "nodes-1", symlinks=True)
    (folder / "nodes-1/submitted.json").unlink()
    scaling_file.save_points(folder, [scaling_file.PointSizes(nodes, 4 * nodes, 64, 0.1) for nodes in (1, 2)])


def _data(base: Path) -> None:
    from PIL import Image

    for number in range(20):
        folder = base / "images" / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 8), (number * 12, 0, 0)).save(folder / f"{number}.png")
    from hpc.packed import pack_command

    for split in ("train", "val", "test"):
        shutil.copytree(base / "images", base / "splits" / split)
    pack_command.pack([f"data.dir={base}/splits", f"out={base}/packed.npy", "data.image_size=8"])
    (base / "text").mkdir()
    for number in range(3):
        (base / "text" / f"{number}.txt").write_text("to be or not to be " * 40)
