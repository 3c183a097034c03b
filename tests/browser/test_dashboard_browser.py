"""The dashboard in a real browser: a run that grows, lost workers, hostile texts, widths, themes, keys, saved pages."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rainband.views.dashboard.saved import SavedPage
from tests.browser.driver import Browser, missing
from tests.dashboard_runs import HOSTILE, made_run, written

pytestmark = [pytest.mark.browser, pytest.mark.processes]

MAIN = "from rainband.cli.main import main; main()"
DRAWN = "return Number(document.documentElement.dataset.drawn ?? 0)"
ELEMENTS = "return [...new Set([...document.querySelectorAll('*')].map((e) => e.localName))].sort().join(' ')"
CHOOSE = "const runs = document.querySelector('#runs'); runs.value = arguments[0]; runs.onchange({target: runs})"
RIGHT, TAB = "\ue014", "\ue004"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    lacks = missing() or ("uvicorn" if importlib.util.find_spec("uvicorn") is None else "")
    if lacks:
        reason = f"{lacks} is not installed (Debian: apt install chromium chromium-driver)"
        if os.environ.get("RAINBAND_NEED_BROWSER"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    profile = tmp_path_factory.mktemp("profile")
    browser = Browser(profile)
    try:
        yield browser
    finally:
        browser.close()
        shutil.rmtree(profile, ignore_errors=True)


@pytest.fixture(autouse=True)
def quiet(browser: Browser) -> Iterator[None]:
    """Fail a test in which the console has an error, or in which the page asked another address than its own."""
    browser.console(), browser.addresses()
    yield
    assert browser.console() == []
    outside = [address for address in browser.addresses() if not is_own(address)]
    assert outside == []


def is_own(address: str) -> bool:
    return address.startswith(("http://127.0.0.1:", "data:", "about:", "file://", "chrome://"))


@contextmanager
def served(browser: Browser, directory: Path) -> Iterator[str]:
    """Serve a run with the command, and return the address that it prints. Leave the page before the server ends."""
    command = [sys.executable, "-c", MAIN, "dashboard", str(directory)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        browser.open("about:blank")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (0, "")  # Ctrl-C is no error


@contextmanager
def running(directory: Path) -> Iterator[None]:
    """Hold the lock by which readers know that a run lasts."""
    with (directory / "events.jsonl").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def text(browser: Browser, selector: str) -> str:
    found = browser.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector)
    assert isinstance(found, str)
    return found


def test_a_live_run_grows_and_a_lost_worker_is_marked(browser: Browser, tmp_path: Path) -> None:
    run = made_run(4, 20, lost=[2], text="killed by signal 9")
    lost = next(k for k, event in enumerate(run) if type(event).__name__ == "Lost")
    directory = written(tmp_path / "run", run[: lost - 4])
    with served(browser, directory) as address:
        with running(directory):
            browser.open(address)
            browser.until("return document.querySelectorAll('#workers tbody tr').length === 4")
            assert "running" in text(browser, "#state") and text(browser, "#link") == "● live"
            before, drawn = text(browser, "#facts"), browser.run(DRAWN)
            assert text(browser, "[data-lost]") == ""
            with (directory / "events.jsonl").open("ab") as file:  # as a run does: the file keeps its lock
                file.write((written(tmp_path / "more", run[lost - 4 : lost + 6]) / "events.jsonl").read_bytes())
            browser.until("return document.querySelector('#workers [data-lost]')")
            assert "worker 2" in text(browser, "[data-lost]") and "✕ lost" in text(browser, "[data-lost]")
            assert text(browser, "#facts") != before and browser.run(DRAWN) > drawn
            assert "Lost or inactive: worker 2" in text(browser, "#sentences")
            with (directory / "events.jsonl").open("ab") as file:
                file.write((written(tmp_path / "rest", run[lost + 6 :]) / "events.jsonl").read_bytes())
            browser.until("return document.querySelector('#state').textContent.includes('finished')")
        browser.until("return document.querySelector('#link').textContent === ''")
        assert "token" not in browser.run("return location.href")


def test_texts_of_a_hostile_run_make_no_element(browser: Browser, tmp_path: Path) -> None:
    harmless = written(tmp_path / "harmless", made_run(3, 5, lost=[1]))
    hostile = written(tmp_path / "hostile", made_run(3, 5, lost=[1], text=HOSTILE), rest=b'{"event":"Lost","no')
    elements = []
    for directory in (harmless, hostile):
        with served(browser, directory) as address:
            browser.open(address)
            browser.until(DRAWN)
            elements.append(browser.run(ELEMENTS))
            assert browser.run("return document.querySelectorAll('img').length") == 0
            logged = text(browser, "#events")
    assert elements[0] == elements[1]
    assert HOSTILE.partition("\u2028")[0] in logged


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_width_needs_scrolling_sideways(browser: Browser, tmp_path: Path, theme: str) -> None:
    kept = os.environ.get("RAINBAND_SCREENSHOTS")
    browser.prefer(theme)
    sizes = {"few": 6, "many": 300}
    for name, num_workers in sizes.items():
        run = made_run(num_workers, 30, lost=[1], text="a_long_name_without_a_space_" * 8)
        with served(browser, written(tmp_path / name, run)) as address:
            for width in (320, 800, 1280):
                browser.resize(width, 800)
                browser.open(address)
                browser.until(DRAWN)
                assert browser.run("return document.documentElement.scrollWidth") <= width
                assert browser.run("return document.documentElement.dataset.theme") == theme
                if kept:
                    browser.screenshot(Path(kept) / f"dashboard-{name}-{width}-{theme}.png")


def test_keys_choose_what_is_drawn(browser: Browser, tmp_path: Path) -> None:
    browser.resize(1280, 800)
    with served(browser, written(tmp_path / "run", made_run(3, 20))) as address:
        browser.open(address)
        browser.until(DRAWN)
        assert text(browser, "#strips-title") == "Staleness"
        browser.run("document.querySelector('#strip-kinds [aria-checked=true]').focus()")
        browser.press(RIGHT)
        browser.until("return document.querySelector('#strips-title').textContent === 'Waiting'")
        assert text(browser, "#strip-kinds [aria-checked=true]") == "waiting"
        browser.press(TAB)  # a group of radio buttons is one stop
        assert browser.run("return document.activeElement.closest('#strip-kinds') === null")


def test_a_saved_page_needs_no_server(browser: Browser, tmp_path: Path) -> None:
    run = made_run(3, 20, lost=[1], text=HOSTILE)
    SavedPage(written(tmp_path / "run", run)).save(tmp_path / "page.html")
    browser.open(f"file://{tmp_path / 'page.html'}")
    browser.until(DRAWN)
    assert browser.run("return document.querySelectorAll('#workers tbody tr').length") == 3
    assert browser.run("return document.querySelectorAll('.uplot').length") == 2
    assert browser.run("return document.querySelectorAll('img').length") == 0


def test_another_run_can_be_chosen(browser: Browser, tmp_path: Path) -> None:
    written(tmp_path / "other", made_run(2, 5, text="another"))
    with served(browser, written(tmp_path / "run", made_run(3, 5))) as address:
        browser.open(address)
        browser.until("return document.querySelector('#runs')?.options.length === 2")
        browser.run(CHOOSE, "other")
        browser.until("return document.querySelector('#title').textContent.startsWith('another')")
        assert browser.run("return location.hash") == "#run=other"
