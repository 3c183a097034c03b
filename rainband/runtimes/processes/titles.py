"""Names a process, so that `ps` and `top` tell what it is."""

from __future__ import annotations

import setproctitle

_NAME_BYTES = 15  # what the kernel keeps of a thread's name


def set_title(title: str) -> None:
    """Show `title` as this process's command line (`ps`), and a short form of it as its name (`top`)."""
    setproctitle.setproctitle(title)
    setproctitle.setthreadtitle(short_title(title))  # second, because the first puts the cut-off title there


def short_title(title: str) -> str:
    """Shorten to 15 bytes, but keep the last word: "rainband worker 2" is "rb worker 2"."""
    title = title.replace("rainband", "rb", 1)
    if len(title.encode()) <= _NAME_BYTES:
        return title
    head, space, last = title.rpartition(" ")
    end = _first_bytes(space + last, _NAME_BYTES)
    return (_first_bytes(head, _NAME_BYTES - len(end.encode())) + end).lstrip()


def _first_bytes(text: str, num_bytes: int) -> str:
    return text.encode()[:num_bytes].decode(errors="ignore")  # no half letters
