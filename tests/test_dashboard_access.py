"""Access to the dashboard: none without the token or under another host name, by any route and method."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

if importlib.util.find_spec("starlette") is None:
    pytest.skip("starlette is not installed: pip install 'rainband[dashboard]'", allow_module_level=True)

from rainband.views.dashboard import app as dashboard_app
from rainband.views.dashboard.app import Dashboard
from rainband.views.dashboard.guard import HEADERS, host_name
from rainband.views.dashboard.listener import LOOPBACK, address_of, listen, new_token
from rainband.views.sinks.dashboard import DashboardProcess
from tests.dashboard_runs import made_run, written

TOKEN = "a-token"
DATA = ("/api/runs", "/api/run", "/api/stream", "/api/spans", "/api/events?before=0", "/metrics", "/api/", "/other")
OPEN = ("/", "/static/main.js", "/static/uplot/uPlot.iife.min.js")
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT")
LIMIT_S = 20.0


class Answered(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """Calls the dashboard as a server would, without a socket."""

    def __init__(self, root: Path, chosen: str = "run", hosts: tuple[str, ...] = LOOPBACK) -> None:
        self.dashboard = Dashboard(root, chosen)
        self.app = self.dashboard.app(TOKEN, hosts)

    def ask(
        self, address: str, method: str = "GET", token: str | None = TOKEN, host: str = "127.0.0.1:8000", **more: str
    ) -> Answered:
        headers = {"host": host, **more}
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
        return asyncio.run(asyncio.wait_for(self.call(address, method, headers), LIMIT_S))

    async def call(
        self, address: str, method: str, headers: dict[str, str], receive: Callable[[bytes], None] = lambda part: None
    ) -> Answered:
        path, _, query = address.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "server": ("127.0.0.1", 8000),
            "client": ("127.0.0.1", 9000),
        }
        sent: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)
            receive(message.get("body", b""))

        asked = False

        async def wait_for_request() -> dict[str, Any]:
            nonlocal asked
            if not asked:
                asked = True
                return {"type": "http.request", "body": b"", "more_body": False}
            await asyncio.Event().wait()  # the browser stays
            raise AssertionError

        app: Callable[..., Awaitable[None]] = self.app
        await app(scope, wait_for_request, send)
        start = sent[0]
        body = b"".join(message.get("body", b"") for message in sent)
        return Answered(start["status"], {k.decode(): v.decode() for k, v in start["headers"]}, body)


@pytest.fixture
def client(tmp_path: Path) -> Client:
    written(tmp_path / "run", made_run(3, 5))
    written(tmp_path / "other", made_run(2, 3, text="another"))
    written(tmp_path.parent / "outside", made_run(2, 3))
    return Client(tmp_path)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("address", DATA)
def test_no_data_without_the_token(client: Client, address: str, method: str) -> None:
    for token in (None, "", "another", TOKEN + "x", TOKEN[:-1]):
        answer = client.ask(address, method, token)
        assert answer.status == 401
        assert b"digits" not in answer.body
    assert client.ask(f"{address.partition('?')[0]}?token={TOKEN}", method, None).status == 401


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("address", [*DATA, *OPEN])
def test_no_answer_under_another_host_name(client: Client, address: str, method: str) -> None:
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8000", "", "evil.example:127.0.0.1"):
        assert client.ask(address, method, host=host).status == 400


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8000", "localhost:1", "LOCALHOST", "[::1]:8000", "[::1]"])
def test_this_machine_has_three_names(client: Client, host: str) -> None:
    assert client.ask("/api/runs", host=host).status == 200


def test_a_name_can_be_allowed(tmp_path: Path) -> None:
    client = Client(tmp_path, hosts=(*LOOPBACK, "training.lan"))
    assert client.ask("/", host="training.lan:80").status == 200
    assert host_name("[fe80::1]:80") == "fe80::1"


def test_the_page_itself_needs_no_token_and_has_no_data(client: Client) -> None:
    for address in OPEN:
        answer = client.ask(address, token=None)
        assert answer.status == 200
        assert b"digits" not in answer.body


@pytest.mark.parametrize("address", [*DATA, *OPEN, "/static/none.js", "/static/../app.py", "/static/%2e%2e/app.py"])
def test_every_answer_has_the_headers(client: Client, address: str) -> None:
    for method, token, host in (
        ("GET", TOKEN, "127.0.0.1"),
        ("POST", TOKEN, "127.0.0.1"),
        ("GET", None, "evil.example"),
    ):
        answer = client.ask(address, method, token, host)
        assert {name: answer.headers.get(name) for name in HEADERS} == HEADERS
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("method", [method for method in METHODS if method not in ("GET", "HEAD")])
@pytest.mark.parametrize("address", [*DATA[:6], *OPEN])
def test_nothing_can_be_changed(client: Client, address: str, method: str) -> None:
    assert client.ask(address, method).status == 405


@pytest.mark.parametrize("name", ["none", "..", ".", "../outside", "run/../other", "/etc", "", "run%00", "outside"])
def test_only_runs_of_the_folder_are_shown(client: Client, name: str) -> None:
    assert client.ask(f"/api/run?run={name}").status == 404


def test_another_run_of_the_folder_is_shown(client: Client) -> None:
    assert client.ask("/api/run").json["now"]["task"] == "digits"
    assert client.ask("/api/run?run=other").json["now"]["task"] == "another"
    listed = client.ask("/api/runs").json
    assert (listed["chosen"], sorted(run["name"] for run in listed["runs"])) == ("run", ["other", "run"])


@pytest.mark.parametrize(
    "address",
    [
        *("/api/spans?seconds=none", "/api/spans?seconds=nan", "/api/spans?seconds=-1", "/api/spans?width=0"),
        *("/api/spans?from=inf", "/api/spans?seconds=1e9", "/api/spans?width=1e9"),
        *("/api/events", "/api/events?before=-1", "/api/events?before=999999999", "/api/events?before=0&n=0"),
        *("/api/events?before=0&n=100000", "/api/events?before=x"),
    ],
)
def test_parameters_are_checked(client: Client, address: str) -> None:
    assert client.ask(address).status == 400


def test_few_runs_are_kept_open(client: Client, tmp_path: Path) -> None:
    for k in range(20):
        written(tmp_path / f"run-{k}", made_run(1, 1))
        assert client.ask(f"/api/run?run=run-{k}").status == 200
    assert len(client.dashboard.open) == dashboard_app.MAX_OPEN


# ---- the stream ----


def messages_of(body: bytes) -> list[tuple[str, Any]]:
    found = []
    for part in body.decode().split("\n\n")[:-1]:
        fields = dict(line.partition(": ")[::2] for line in part.split("\n"))
        if "event" in fields:
            found.append((fields["event"], json.loads(fields["data"])))
    return found


def test_the_stream_of_a_finished_run_ends(client: Client) -> None:
    messages = messages_of(client.ask("/api/stream").body)
    assert [kind for kind, _ in messages] == ["all", "end"]
    assert messages[0][1]["now"]["state"] == "finished"


def test_the_stream_follows_a_run_that_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard_app, "TICK_S", 0.001)
    monkeypatch.setattr("rainband.views.dashboard.fold.is_locked", lambda path: True)
    run = made_run(2, 6)
    directory = written(tmp_path / "run", run[:8])
    client, received = Client(tmp_path), []

    def grow(part: bytes) -> None:
        received.extend(messages_of(part))
        if part:
            written(directory, run[: 8 + 3 * len(received)])

    headers = {"host": "localhost", "authorization": f"Bearer {TOKEN}"}
    asyncio.run(asyncio.wait_for(client.call("/api/stream", "GET", headers, grow), LIMIT_S))
    kinds = [kind for kind, _ in received]
    assert kinds[0] == "all" and kinds[-1] == "end" and kinds.count("tick") >= 2
    done = [message["now"]["samples_done"] for kind, message in received if kind != "end"]
    assert done == sorted(done) and done[-1] == 6000
    sizes = [len(json.dumps(message["history"])) for kind, message in received if kind == "tick"]
    assert max(sizes) < len(json.dumps(received[0][1]["history"])) + 2000  # only what is new


def test_a_server_that_stops_looks_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rainband.views.dashboard.fold.is_locked", lambda path: True)
    directory = written(tmp_path / "run", made_run(2, 6)[:-1])
    client, received = Client(tmp_path), []

    def stop(part: bytes) -> None:
        received.extend(messages_of(part))
        written(directory, made_run(2, 6))
        client.dashboard.stopping.set()

    headers = {"host": "localhost", "authorization": f"Bearer {TOKEN}"}
    asyncio.run(asyncio.wait_for(client.call("/api/stream", "GET", headers, stop), LIMIT_S))
    assert received[-1][1]["now"]["state"] == "finished"


# ---- addresses and processes ----


def test_an_address_has_the_token_where_browsers_do_not_send_it() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert address_of(listener, "t") == f"http://127.0.0.1:{port}/#token=t"
    assert len({new_token() for _ in range(10)}) == 10 and len(new_token()) >= 32


@pytest.mark.processes
def test_a_process_beside_the_run_serves_it_and_ends_with_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import urllib.request

    written(tmp_path / "run", made_run(2, 3))
    sink = DashboardProcess(tmp_path / "run")
    address, _, token = capfd.readouterr().err.split()[-1].partition("/#token=")
    request = urllib.request.Request(f"{address}/api/run", headers={"authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        assert json.load(answer)["now"]["name"] == "run"
    arguments = Path(f"/proc/{sink.process.pid}/cmdline").read_bytes()
    assert token.encode() not in arguments
    sink.close()
    assert sink.process.returncode == 0


def test_a_name_that_is_too_long_is_an_unknown_run(tmp_path: Path) -> None:
    client = Client(tmp_path)
    for name in ("a" * 300, "a%00b"):
        answered = client.ask(f"/api/run?run={name}")
        assert answered.status == 404
        assert {name: answered.headers.get(name) for name in HEADERS} == HEADERS


def test_errors_of_a_route_have_the_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(root: Path) -> None:
        raise OSError("unreadable")

    monkeypatch.setattr(dashboard_app, "list_newest", broken)
    answers: list[dict[str, Any]] = []

    async def ask() -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            answers.append(message)

        headers = [(b"host", b"127.0.0.1"), (b"authorization", f"Bearer {TOKEN}".encode())]
        scope = {"type": "http", "method": "GET", "path": "/api/runs", "query_string": b"", "headers": headers}
        with pytest.raises(OSError, match="unreadable"):
            await Client(tmp_path).app(scope, receive, send)

    asyncio.run(ask())
    names = {name.decode() for name, _ in answers[0]["headers"]}
    assert answers[0]["status"] == 500 and names >= set(HEADERS)
