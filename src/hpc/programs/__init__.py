"""The command lines of a project's programs: submit.py, plan.py, report.py, and those of tools/, which call `run` here.

`run` prints a `ConfigError` without a traceback; `main` raises it.
"""
