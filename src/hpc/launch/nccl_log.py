"""Read which networks NCCL (or RCCL) uses from its log with NCCL_DEBUG=INFO. Pure functions of a text.

The lines are those of NCCL's src/transport/net.cc, 2.4 to 2.31: `... 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA`, with
`IB/0(3)` where another rank's adapter is used, and a plugin's own name for itself, which may hold a space.
"""

import re

CONNECTION = re.compile(r"NCCL INFO .*\[(?:send|receive)\] via NET/([^/\n]+)/\d+(?:\(\d+\))?(/GDRDMA)?")
# Lines that say why the fast network is not used.
FAILURE = re.compile(
    r"NCCL (?:INFO|WARN) (NCCL_(?:IB_DISABLE|NET) set by environment to \S+?(?=\.?$)|NET/IB : No device found"
    r"|NET/OFI .*(?:[Ff]ail|No eligible|Couldn't|error).*|NET/Plugin ?: (?:Could not|Failed to) (?:find|open).*)",
    re.MULTILINE,
)


def used_networks(log: str) -> set[str]:
    """Return the networks that connect ranks: `IB`, `IB with GPUDirect`, `AWS Libfabric`, `Socket`, ...

    Networks that NCCL only considers (`NET/Socket : Using ...`, `Using network Socket`) do not count: NCCL starts with
    sockets, and on one node it names a network that it never uses.
    """
    return {name + (" with GPUDirect" if has_gpudirect else "") for name, has_gpudirect in CONNECTION.findall(log)}


def failure_reasons(log: str) -> list[str]:
    """Return why NCCL did not get other networks, in its own words, each reason once."""
    return list(dict.fromkeys(line.strip().rstrip(".") for line in FAILURE.findall(log)))
