"""Measure the network between GPUs: python tools/comm.py trainer=ddp_4node [cluster=NAME] [key=value]

Submits a job on the nodes that a run with these words would get. It times all-reduce, all-gather and reduce-scatter per
message size, inside a node and across nodes, and leaves a table in its log. Without a scheduler it runs here:
python tools/comm.py trainer=ddp trainer.accelerator=cpu trainer.devices=2
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from hpc.config import errors
from hpc.launch import local_ranks, placement
from hpc.monitor import network_check, network_check_words
from hpc.run import command_line, job_logs, signals
from hpc.submit import options, queue_run


def main(place: placement.Placement, warned: signals.SignalState) -> None:
    asked = network_check_words.parse_arguments(__doc__, sys.argv[1:])
    cfg, words = command_line.compose_parsed(asked), asked.overrides
    if place.launcher != "none":  # this process is one of the ranks that measure
        return network_check.run_network_check(cfg, place, warned=warned, words=words)
    network_check_words.reject_single_rank(cfg)
    if not cfg.cluster.scheduler:
        return local_ranks.start(cfg, words, program=__file__)
    how = options.SubmitOptions(dry_run=asked.dry_run, wait=asked.wait)
    run_dir = queue_run.submit_run(cfg, words, options=how, program="tools/comm.py")
    if how.wait and not how.dry_run:
        print(job_logs.read_tail(run_dir / network_check.TABLE_FILE), end="")


if __name__ == "__main__":
    with errors.exit_on_config_error():
        here = placement.read_placement(os.environ)
    told = signals.listen() if here.launcher != "none" else signals.SignalState()
    with errors.exit_on_config_error(placement.is_reporting_rank(here, os.environ)):
        main(here, told)
