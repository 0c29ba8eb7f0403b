"""Your research: the LightningModule, its networks and its data. Change anything here; the package `hpc` runs it."""

from hpc.config.project import require_same_project

require_same_project(__file__)  # raises ImportError if Python found the hpc of another project
