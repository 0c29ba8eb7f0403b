"""Measure the network between GPUs: python tools/comm.py trainer=ddp_4node [cluster=NAME] [key=value]

Submits a job on the nodes that a run with these words would get. It times all-reduce, all-gather and reduce-scatter per
message size, inside a node and across nodes, and leaves a table in its log. Without a scheduler it runs here:
python tools/comm.py trainer=ddp trainer.accelerator=cpu trainer.devices=2
"""

import argparse
import os
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT / "src"), str(PROJECT)]

from omegaconf import DictConfig

import submit
from hpc.config import compose, errors, preflight
from hpc.config.errors import ConfigError
from hpc.launch import placement
from hpc.monitor import network_check
from hpc.run import command_line, job_logs, watchdog

# What differs from a training run, unless it is typed: it is short, and what failed once fails again.
DEFAULTS = ["name=comm", "cluster.time=0:15:00", "faults.retries=1"]


def main(place: placement.Place, warned: watchdog.Warned) -> None:
    asked = arguments()
    frozen = command_line.resumes(asked.overrides) is not None
    if not frozen:
        asked.overrides = shared_out([*DEFAULTS, *asked.overrides])
    if place.launcher == "none":
        cfg = command_line.composed(asked)
        reject_alone(cfg)
        if cfg.cluster.scheduler:
            submitted(asked)
        else:
            start_here(cfg, asked.overrides)
        return
    cfg = command_line.composed(asked)
    preflight.rules(cfg)
    reject_alone(cfg)
    try:
        network_check.run_network_check(
            cfg, place, warned=warned, words=compose.typed(asked.overrides), frozen=frozen
        )
    except watchdog.Stopped as stopped:
        if placement.speaks(place, os.environ):
            print(f"stopped: {stopped.why}", flush=True)
        sys.exit(1)


def arguments() -> argparse.Namespace:
    parser = compose.parser(__doc__)
    parser.add_argument("--dry-run", action="store_true", help="print the job script and write nothing")
    parser.add_argument("--wait", action="store_true", help="wait for the job and print its table")
    parser.set_defaults(parsable=False)
    return parser.parse_intermixed_args(sys.argv[1:])


def shared_out(words: list[str]) -> list[str]:
    """With a global batch that any number of ranks can share: nothing is trained."""
    trainer = compose.compose_overrides(words).trainer
    if any(word.startswith("data.global_batch_size=") for word in words) or not trainer.devices:
        return words
    size = trainer.num_nodes * trainer.devices * trainer.accumulate_grad_batches
    return [*words, f"data.global_batch_size={size}"]


def reject_alone(cfg: DictConfig) -> None:
    if cfg.trainer.num_nodes * (cfg.trainer.devices or 2) == 1:
        rule = "one rank has nobody to talk to: a network is measured between two or more"
        raise ConfigError("trainer.devices", 1, rule, "trainer=ddp trainer.devices=2, or trainer=ddp_4node")


def submitted(asked: argparse.Namespace) -> None:
    run_dir = submit.submit(asked, program="tools/comm.py")
    if asked.wait and not asked.dry_run:
        print(job_logs.text(run_dir / network_check.TABLE_FILE), end="")


def start_here(cfg: DictConfig, words: list[str]) -> None:
    """The ranks of one machine, as children of torchrun: when one dies it ends the others."""
    nodes = cfg.trainer.num_nodes
    if nodes > 1:
        rule = f"cluster={cfg.cluster.name} has no scheduler that could start ranks on other nodes"
        raise ConfigError("trainer.num_nodes", nodes, rule, "cluster=<one of --help>, or trainer.num_nodes=1")
    preflight.check(cfg)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(["--standalone", f"--nproc-per-node={cfg.trainer.devices}", "--max-restarts=0", __file__, *words])
    except ChildFailedError as failed:
        rank, first = failed.get_first_failure()
        sys.exit(f"rank {rank} ended with exit code {first.exitcode}: see what it said above, and errors/ of the run")


if __name__ == "__main__":
    with errors.exit_on_config_error():
        here = placement.place(os.environ)
    told = watchdog.listen() if here.launcher != "none" else watchdog.Warned()
    with errors.exit_on_config_error(placement.speaks(here, os.environ)):
        main(here, told)
