"""Access to the dashboard: the token, the names by which it may be called, and headers of every answer."""

from __future__ import annotations

import hmac

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

OPEN = ("/", "/static/")  # the page itself has no data of a run
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
NO_TOKEN = "open the address that the command printed: it ends with #token=..."


class Guard:
    """Refuses requests to another host name, and those for data without the token, whatever their method.

    A web site that the user visits can make the browser send requests to a port of this machine, under a host name
    of its own if it controls that name's address (DNS rebinding). It does not know the token, and its name is refused.
    """

    def __init__(self, app: ASGIApp, token: str, hosts: tuple[str, ...]) -> None:
        self.app = app
        self.expected = f"Bearer {token}".encode()
        self.hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":  # there are none
                await send({"type": "websocket.close", "code": 1008})
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *(pair for pair in message["headers"] if pair[0].decode() not in HEADERS),
                    *((name.encode(), value.encode()) for name, value in HEADERS.items()),
                ]
            await send(message)

        answer = self._refusal(scope) or self.app
        await answer(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> PlainTextResponse | None:
        headers = list(scope["headers"])
        names = [value for name, value in headers if name == b"host"]
        if len(names) != 1 or host_name(names[0].decode("latin-1")) not in self.hosts:
            return PlainTextResponse("this host name is not allowed: add it with --allow-host", 400)
        path: str = scope["path"]
        if path == OPEN[0] or path.startswith(OPEN[1]):
            return None
        given = [value for name, value in headers if name == b"authorization"]
        if len(given) != 1 or not hmac.compare_digest(given[0], self.expected):
            return PlainTextResponse(NO_TOKEN, 401, {"www-authenticate": "Bearer"})
        return None


def host_name(header: str) -> str:
    """Return the name in a Host header, without the port: "::1" for "[::1]:8000"."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.rpartition(":")[0].lower() if ":" in header else header.lower()
