"""Your research: the module, its networks, its data. Change anything; `hpc`, beside it, runs them."""

from hpc.config.project import require_beside

require_beside(__file__)
