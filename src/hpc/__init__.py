"""Run a LightningModule on a supercomputer. A project has this library at the commit that its pyproject.toml names.

Its folders are rooms. docs/how-it-works.md in the repository shows them, and which may import which.
"""

from hpc.system import former_names

former_names.install()  # before anything imports lightning
