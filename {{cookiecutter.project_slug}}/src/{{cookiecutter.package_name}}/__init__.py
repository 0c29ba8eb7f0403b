"""Your research: the LightningModule, its networks and its data. Change anything here; the library `hpc` runs it."""
