"""The sockets on which the processes of one machine accept connections from other machines."""

from __future__ import annotations

import socket

from rainband.options import OptionError, opt
from rainband.runtimes.config import Door
from rainband.runtimes.machines.addresses import MAX_PORT, HostPort, parse_address, reachable_host
from rainband.transports.connect import is_loopback, listen_tcp
from rainband.transports.tls.certificate import Certificate, new_certificate


class Doors:
    """The sockets on which the processes of one machine accept connections from others."""

    def __init__(self, listen: str, advertise: str, num_servers: int, for_servers_only: bool = False) -> None:
        """With a port, server 0 has the next one, and so on; with port 0, each has any that is free."""
        address = parse_address("listen", listen)
        first = 0 if for_servers_only else 1
        self.socks: list[socket.socket] = []
        try:
            last = address.port and address.port + num_servers + first - 1
            if last > MAX_PORT:
                raise OptionError(
                    f"{opt('listen', listen)}: the servers ({num_servers}) use the next ports, and {MAX_PORT} is the "
                    f"last there is: use a port up to {address.port - (last - MAX_PORT)}."
                )
            for number in range(num_servers + first):
                self.socks.append(self._listen(address, number, first))
            loopback = is_loopback(self.socks[0])
            self.certificate: Certificate | None = None if loopback else new_certificate()
            shown = HostPort("", 0)
            if advertise:
                shown = parse_address("advertise", advertise, default_port=address.port)
            self.host = shown.host or reachable_host(self.socks[0])
            self.warning = _unreachable(address, self.host) if loopback and not advertise else ""
        except ValueError as error:
            self.close()
            raise (
                error if isinstance(error, OptionError) else OptionError(f"{opt('listen', listen)}: {error}")
            ) from None
        shift = shown.port - address.port if shown.port and address.port else 0  # a router may forward other ports
        self.ports = [sock.getsockname()[1] + shift for sock in self.socks]

    def _listen(self, address: HostPort, number: int, first: int) -> socket.socket:
        try:
            return listen_tcp(address.host, address.port and address.port + number)
        except ValueError as error:
            if number < first:
                raise
            last = f"{address.port + first} and up" if address.port else "of their own"
            raise ValueError(f"{error} The servers use the ports {last}.") from None

    @property
    def fingerprint(self) -> bytes:
        return self.certificate.fingerprint if self.certificate else b""

    def door(self, number: int) -> Door:
        return Door(host=self.host, port=self.ports[number], certificate=self.certificate)

    def of_server(self, index: int) -> Door | None:
        """Return the door of a server of the run's own machine; None if servers are elsewhere."""
        return self.door(index + 1) if index + 1 < len(self.socks) else None

    def close(self) -> None:
        for sock in self.socks:
            sock.close()


def _unreachable(listen: HostPort, host: str) -> str:
    """Return the warning that only processes of this machine can connect."""
    name = "" if listen.host == host else f"{listen.host} is {host} here. "
    return (
        f"{name}Other machines cannot reach {host}: listen at 0.0.0.0:{listen.port}, or at another address of this "
        "machine."
    )
