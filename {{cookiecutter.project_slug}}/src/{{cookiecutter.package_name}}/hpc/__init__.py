"""The machine's rooms, updated from the template. They know nothing of the network beyond the contract in `models/`.

jobs         a config becomes a job: Slurm and PBS scripts, the command line, a run that moves
checks       what is refused before the queue, and what a node is asked before training
running      the life of a run's processes: begun, recorded, watched, ended, and why
resuming     stopping and going on without losing a step
checkpoints  saved and read: whole or absent, never executed
training     what a strategy does to a network
storage      packed files, staging, batches fetched ahead
monitoring   curves, throughput, use of the node and its GPUs
networking   bandwidth between GPUs and nodes
studies      many jobs from one command: sweeps, searches, scaling
planning     memory, step time and cost before the job: a traced network and a machine
reporting    one page of a run, TensorBoard through a tunnel
charts       axes and lines, without a plotting library
"""
