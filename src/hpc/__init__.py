"""Run a LightningModule on a supercomputer. A project has this library at the commit that its pyproject.toml names.

Rooms, ground first. Each imports only rooms above it in this list; `lint-imports` checks that.

system       files that may be damaged, the home directory, processes, tables for the terminal
config       one composed config, typed and checked, from configs/ and what a person types
launch       where a process stands among its ranks, how ranks meet, what the links between nodes measure
run          the life of a run: its directory, who may write, signals, watchdog, history
jobs         a config becomes a job script for Slurm or PBS; facts of clusters and GPUs
checkpoint   written whole or absent, read without executing anything, moved between strategies
state        what a module, its data and its callbacks keep in attributes, and whether it has changed
data         one global order of samples, loaders shared out and resumed, streams
packed       one large file in the place of many small ones: packing, reading, tokens, staging
logging      loggers, curves and how far they had come at a checkpoint
training     strategies, what they do to a network, the start of an attempt
predict      predictions, written as they are made and joined in order
resume       stop between two optimizer steps and go on exactly
monitor      throughput and MFU, samples of each node, profiles, bandwidth of links
charts       line charts on pages that are one file, and numbers as text
plan         a traced training step and a machine become memory, time and cost
submit       from a checked config to a queued run
studies      many runs from one command: sweeps, searches, scaling
report       what became of a run, in the terminal and as a page
"""

from hpc.system import former_names

former_names.install()  # before anything imports lightning
