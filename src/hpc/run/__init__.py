"""The life of a run: its directory and config, who may write, signals, the watchdog, and the history of attempts.

Others use
    directory, frozen_config, changes   make a run directory; keep its config, and compare it with a new one
    command_line, program               from typed words to the config of a run, and to an exit code
    claim, attempt_log, restarts        who may write; what attempts have recorded; restarts by the scheduler
    watchdog, signals, stacks           ranks that fail together; warnings before the end of a job
    snapshot, environment               the code of a job, and its Python environment
    installation                        what env.sh calls to complete this environment
    skipped_samples                     what a run leaves out after a rollback
    history, job_logs                   what runs have left, read again for tables and reports
It needs config, launch and system, and imports neither torch nor lightning.
"""
