"""What NCCL (or RCCL) says with NCCL_DEBUG=INFO of the network that it uses. Pure.

The lines are those of NCCL's src/transport/net.cc, 2.4 to 2.31: `... 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA`, with
`IB/0(3)` where another rank's adapter is used, and a plugin's own name for itself, which may hold a space.
"""

import re

CONNECTION = re.compile(r"NCCL INFO .*\[(?:send|receive)\] via NET/([^/\n]+)/\d+(?:\(\d+\))?(/GDRDMA)?")
# Lines that tell why the fast network was not used.
FAILURE = re.compile(
    r"NCCL (?:INFO|WARN) (NCCL_(?:IB_DISABLE|NET) set by environment to \S+?(?=\.?$)|NET/IB : No device found"
    r"|NET/OFI .*(?:[Ff]ail|No eligible|Couldn't|error).*|NET/Plugin ?: (?:Could not|Failed to) (?:find|open).*)",
    re.MULTILINE,
)


def used_networks(log: str) -> set[str]:
    """The networks that ranks are connected by: `IB`, `IB with GPUDirect`, `AWS Libfabric`, `Socket`, ...

    What is only looked at (`NET/Socket : Using ...`, `Using network Socket`) does not count: NCCL starts with sockets,
    and on one node it names a network that it never uses.
    """
    return {name + (" with GPUDirect" if direct else "") for name, direct in CONNECTION.findall(log)}


def failure_reasons(log: str) -> list[str]:
    """What NCCL says of networks that it did not get, each once."""
    return list(dict.fromkeys(found.strip().rstrip(".") for found in FAILURE.findall(log)))
