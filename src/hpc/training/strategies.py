"""The former place of the strategies, which the config of an earlier run names."""

from hpc.strategies.ddp import DDP as DDP
from hpc.strategies.fsdp import FSDP as FSDP
from hpc.strategies.single import Single as Single
