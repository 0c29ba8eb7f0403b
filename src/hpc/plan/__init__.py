"""Predictions of memory, step time and cost of a run, from a traced training step and the facts of a machine.

Offers `run_plan` (all that plan.py prints), `plan_arguments` (its command line), `memory_check.reject_too_big` (called
before each submission), and `tracer` and `memory` for benchmarks. Only the tracer's own process imports torch. It needs
the rooms config, jobs (facts of GPUs), charts (units), data and training (a step without a run).
"""
