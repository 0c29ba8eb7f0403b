"""Measure the network between GPUs: python tools/comm.py trainer=ddp_4node [cluster=NAME] [key=value]

Submits a job with the nodes that a run with these words would get. The job times all-reduce, all-gather and
reduce-scatter for several message sizes, within a node and across nodes, and writes a table into its log. Without a
scheduler it runs on this machine: python tools/comm.py trainer=ddp trainer.accelerator=cpu trainer.devices=2
"""

import os
import sys

from hpc.config import errors, project
from hpc.launch import placement
from hpc.run import command_line, job_logs, signals
from hpc.studies import network_check, network_check_command
from hpc.submit import options, queue_run


def main(place: placement.Placement, signal_state: signals.SignalState) -> None:
    arguments = network_check_command.parse_arguments(__doc__, sys.argv[1:])
    cfg, words = command_line.compose_parsed(arguments), arguments.overrides
    if place.launcher != "none":  # this process is one of the job's ranks
        return network_check.run_network_check(cfg, place, signal_state=signal_state, words=words)
    network_check_command.reject_single_rank(cfg)
    if not cfg.cluster.scheduler:
        return network_check_command.start_ranks(cfg, words, program=str(project.PROJECT / "tools" / "comm.py"))
    submit_options = options.SubmitOptions(dry_run=arguments.dry_run, wait=arguments.wait)
    run_dir = queue_run.submit_run(cfg, words, options=submit_options, program="tools/comm.py")
    if submit_options.wait and not submit_options.dry_run:
        print(job_logs.read_tail(run_dir / network_check.TABLE_FILE), end="")


def run() -> None:
    """Do what the command line says, and exit."""
    with errors.exit_on_config_error():
        place = placement.read_placement(os.environ)
    signal_state = signals.install_signal_handlers() if place.launcher != "none" else signals.SignalState()
    with errors.exit_on_config_error(placement.is_reporting_rank(place, os.environ)):
        main(place, signal_state)
