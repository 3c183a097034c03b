"""A run's page as one HTML file: it has its data, scripts and styles in itself, and asks no server for anything."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from pathlib import Path

import msgspec

from rainband.views.dashboard.fold import RunFile
from rainband.views.dashboard.page import RunPage

STATIC = Path(__file__).parent / "static"
FRAME_HEIGHT = 900  # pixels, in a notebook
# Browsers run only what has one of these hashes: nothing that a run has printed.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {hashes}; base-uri 'none'"
_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./([\w]+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|let|class) ([\w$]+))", re.MULTILINE)


class SavedPage:
    """The page of a run; notebooks display it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.html = saved_page(directory)

    def _repr_html_(self) -> str:
        """Return a frame of its own, so that neither the notebook nor the page changes the other."""
        style = f"width: 100%; height: {FRAME_HEIGHT}px; border: 0"
        return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{html.escape(self.html)}"></iframe>'

    def save(self, path: str | Path) -> None:
        """Write the page as one HTML file."""
        Path(path).write_text(self.html, encoding="utf-8")


def saved_page(directory: Path) -> str:
    """Return the page of a run as one HTML document."""
    file = RunFile(directory)
    file.read()
    page = RunPage(file)
    history, _ = page.history()
    data = msgspec.json.encode({"now": page.now(), "history": history}).decode()
    scripts = [(STATIC / "uplot" / "uPlot.iife.min.js").read_text(), joined_modules("main")]
    styles = [(STATIC / "uplot" / "uPlot.min.css").read_text(), (STATIC / "app.css").read_text()]
    policy = POLICY.format(hashes=" ".join(f"'sha256-{_digest(script)}'" for script in scripts))
    document = (STATIC / "index.html").read_text()
    document = re.sub(r"^<(link rel=\"stylesheet\"|script).*\n", "", document, flags=re.MULTILINE)
    head = f'<meta http-equiv="content-security-policy" content="{policy}">\n'
    head += "".join(f"<style>{style}</style>\n" for style in styles)
    body = f'<script type="application/json" id="run-data">{_as_script_text(data)}</script>\n'
    body += "".join(f"<script>{script}</script>\n" for script in scripts)
    return document.replace('<meta charset="utf-8">\n', '<meta charset="utf-8">\n' + head, 1).replace(
        "</body>", body + "</body>", 1
    )


def _as_script_text(json: str) -> str:
    """Escape what could end a script element; JSON reads the escapes as the same characters."""
    return json.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def joined_modules(main: str) -> str:
    """Return a script of this module and those that it imports, each in a function of its own."""
    ordered: list[str] = []

    def visit(name: str) -> None:
        for _, needed in _IMPORT.findall(_source(name)):
            visit(needed)
        if name not in ordered:
            ordered.append(name)

    visit(main)
    parts = ["'use strict';\nconst modules = {};\n"]
    for name in ordered:
        source = _IMPORT.sub(r"const \1 = modules.\2;", _source(name))
        exported = [found[1] for found in _EXPORT.finditer(source)]
        body = _EXPORT.sub("", source)
        parts.append(f"modules.{name} = (() => {{\n{body}\nreturn {{ {', '.join(exported)} }};\n}})();\n")
    return "".join(parts)


def _source(name: str) -> str:
    return (STATIC / f"{name}.js").read_text(encoding="utf-8")
