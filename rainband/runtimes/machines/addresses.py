"""Options of runs on several machines: where a run listens, where others reach it, and what such a run cannot have."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from typing import NamedTuple

from rainband.options import OptionError, RunOptions, opt
from rainband.strategy import Requirements
from rainband.transports.connect import host_and_port

ANY_HOST = ("0.0.0.0", "::")
MAX_PORT = 65535


class HostPort(NamedTuple):
    """A host and a port; port 0 is any that is free."""

    host: str
    port: int

    def __str__(self) -> str:
        return host_and_port(self.host, self.port)


def parse_address(option: str, text: str, default_port: int | None = None) -> HostPort:
    """Return the host and the port of `HOST:PORT`; IPv6 addresses are written [::1]:7070."""
    host, colon, port = text.rpartition(":")
    if default_port is not None and (not colon or "]" in port or _is_ipv6(text)):
        host, port = text, str(default_port)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host and not (default_port is not None and _is_ipv6(host)):
        raise OptionError(f"{opt(option, text)}: write an IPv6 address in brackets, such as [fd00::5]:7070.")
    if not host or not port.isdecimal() or int(port) > MAX_PORT:
        raise OptionError(f"{opt(option, text)}: give HOST:PORT, such as 10.0.0.5:7070, with a port up to {MAX_PORT}.")
    return HostPort(host, int(port))


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text.partition("%")[0]).version == 6
    except ValueError:
        return False


def reachable_host(sock: socket.socket) -> str:
    """Return the address at which other machines reach a listening socket; raise OptionError if it is not clear."""
    host: str = sock.getsockname()[0]
    if host not in ANY_HOST:
        return host
    found = _own_addresses(socket.AF_INET6 if ":" in host else socket.AF_INET)
    if len(found) == 1:
        return found[0]
    if not found:
        raise OptionError(
            f"{opt('listen', host)}: this machine has no address that others can reach; connect it first."
        )
    raise OptionError(
        f"{opt('listen', host)}: this machine has the addresses {', '.join(found)}. Also use "
        f"{opt('advertise', found[0])}, or the one that the other machines can reach."
    )


def _own_addresses(family: int) -> Sequence[str]:
    import psutil

    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    of_cards = (address for name, addresses in psutil.net_if_addrs().items() if name in up for address in addresses)
    hosts = (address.address for address in of_cards if address.family == family)
    return [host for host in hosts if not _is_local(host)]


def _is_local(host: str) -> bool:
    address = ipaddress.ip_address(host.partition("%")[0])
    return address.is_loopback or address.is_link_local


def check_machines(options: RunOptions, name: str, requires: Requirements, size: int) -> None:
    """Raise if a run cannot have workers on other machines, or has none at all."""
    if "listen" in options:
        parse_address("listen", options["listen"] or "")
        if "advertise" in options:
            parse_address("advertise", options["advertise"] or "", default_port=0)
    else:
        for given in ("advertise", "min_workers"):
            if given in options:
                raise OptionError(f"{opt(given)} requires {opt('listen', '0.0.0.0:7070')}.")
        if options["workers"] == 0:
            raise OptionError(
                f"{opt('workers', 0)} requires {opt('listen', '0.0.0.0:7070')}, for workers that join from other "
                f"machines: add it, or use {opt('workers', 1)}."
            )
        if options.get("runtime") != "ray":
            return
    why = ""
    if options.get("runtime") == "sim":
        why = "a simulation has no other machines"
    elif not (requires.servers or requires.in_rounds or size > 1):
        why = f"{name} works on one machine only; choose downpour or sync"
    elif requires.algorithm:
        why = f"{name} sums gradients in memory that workers of one machine share; choose sync"
    elif size > 1 and options.get("runtime") == "ray":
        why = f"the workers of {opt('stages')} are not placed on nodes of a cluster yet"
    elif options.get("record") or options.get("transport") == "shm":
        why = f"{opt('record')} and {opt('transport', 'shm')} are for one machine"
    if why:
        raise OptionError(f"{opt('listen') if 'listen' in options else opt('runtime', 'ray')}: {why}.")
