"""Addresses and network interfaces of this machine."""

import socket
import struct


def own_address(peer: str) -> str:
    """Return the address of this machine from which packets to another host are sent; "" if there is no way to it."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((peer, 9))  # a datagram socket: nothing is sent
            return probe.getsockname()[0]
    except OSError:
        return ""


def find_interface(address: str) -> str | None:
    """Return the name of the network interface that has an address; None if none has it (Linux: ioctl SIOCGIFADDR)."""
    import fcntl

    SIOCGIFADDR = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # this interface has no address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
