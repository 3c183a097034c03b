"""`rainband doctor`: check that this machine has what a run requires, and report what to install."""

from __future__ import annotations

import os
import platform
import re
import resource
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from rainband import __version__
from rainband.cli.options import PrintJson, print_lines
from rainband.cli.report_errors import FAILED, report_errors
from rainband.views.formatting import size, table, whole

FEW_FILES = 256  # a server has a few open files per worker
LITTLE_MEMORY_BYTES = 1_000_000_000


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    verdict: Literal["ok", "note", "missing"]  # note: works, but could be better; missing: nothing runs without it
    found: str
    advice: str = ""


def command(
    to: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Check instead whether a run that listens there can be reached; with the file of an invitation, "
            "also whether this machine may join it.",
            show_default=False,
        ),
    ] = None,
    as_json: PrintJson = False,
) -> None:
    """Check that this machine has what a run requires.

    \b
    rainband doctor
    rainband doctor --to 10.0.0.5:7070
    rainband doctor --to invite.txt
    """
    if to is None:
        findings = examine()
        summary = "Everything that is required is here.", "Something that is required is missing."
    else:
        with report_errors():
            findings = list(_way_to(to))
        summary = f"{to} can be reached.", f"{to} cannot be used from this machine."
    well = all(finding.verdict != "missing" for finding in findings)
    if as_json:
        import msgspec

        typer.echo(msgspec.json.encode({"ok": well, "findings": list(map(asdict, findings))}).decode())
    else:
        print_lines(_report(findings, summary[0] if well else summary[1]))
    raise typer.Exit(0 if well else FAILED)


def examine() -> list[Finding]:
    """Run all checks, in the order of the report."""
    machine = _python, _system, _cores, _memory, _shared_memory, _dev_shm, _torch
    return [*(check() for check in (*machine, _loopback, _local_sockets, _open_files)), *_libraries()]


def _way_to(run: str) -> Iterator[Finding]:
    """Check each step on the way to a run of another machine."""
    from rainband.runtimes.machines.reach import reach

    for one in reach(run):
        yield Finding(one.name, "ok" if one.is_good else "missing", one.found, one.advice)


def _report(findings: list[Finding], summary: str) -> list[str]:
    marks = {"ok": "ok", "note": "note", "missing": "MISSING"}
    lines = table([(marks[f.verdict], f.name, f.found) for f in findings])
    if todo := [finding for finding in findings if finding.advice]:
        lines += ["", "What to do:", *table([(f.name, f.advice) for f in todo], indent="  ")]
    return [*lines, "", summary]


def _python() -> Finding:
    found = f"{platform.python_version()} at {sys.executable}, rainband {__version__}"
    return Finding("Python", "ok", found)


def _system() -> Finding:
    found = f"{platform.system()} {platform.release()} {platform.machine()}"
    if sys.platform != "linux":
        return Finding("system", "missing", found, "runs in processes require Linux: use a container or a VM")
    return Finding("system", "ok", found)


def _cores() -> Finding:
    from rainband.runtimes.configure import usable_cores

    usable = usable_cores()
    quota = _cgroup_limit("cpu.max")
    limit = f", limited to {quota:g} by the container" if quota and quota < usable else ""
    if min(usable, quota or usable) < 2:
        return Finding("cores", "note", f"{usable}{limit}", "several workers are not faster than one on one core")
    return Finding("cores", "ok", f"{usable}{limit}")


def _cgroup_limit(name: str) -> float | None:
    """Return a limit of the container: a number, or a quota per period; None: no limit, or unknown."""
    try:
        limit, *period = Path("/sys/fs/cgroup", name).read_text().split()
        return None if limit == "max" else int(limit) / int(period[0] if period else 1)
    except (OSError, ValueError):
        return None


def _memory() -> Finding:
    import psutil

    memory = psutil.virtual_memory()
    limit = _cgroup_limit("memory.max")
    total = min(memory.total, limit) if limit else memory.total
    found = f"{size(memory.available)} free of {size(total)}"
    if min(memory.available, total) < LITTLE_MEMORY_BYTES:
        advice = "each process takes 100 MB and its part of the model: close other programs, or use fewer --workers"
        return Finding("memory", "note", found, advice)
    return Finding("memory", "ok", found)


def _shared_memory() -> Finding:
    """Check anonymous memory files, which the shm transport uses."""
    from rainband.transports.connect import this_machine

    try:
        fd = os.memfd_create("rainband-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, 1 << 20)
        os.close(fd)
    except (AttributeError, OSError) as error:
        advice = "the system must allow memfd_create (a seccomp profile may forbid it)"
        return Finding("shared memory", "missing", f"memfd_create fails: {error}", advice)
    if platform.machine().lower() not in ("x86_64", "amd64", "i686") or not this_machine():
        return Finding(
            "shared memory",
            "note",
            "memfd works, but shared memory between processes is not supported here: they use TCP",
        )
    return Finding("shared memory", "ok", "memfd works")


def _dev_shm() -> Finding:
    """Check /dev/shm, which Rainband does not use, but torch data loaders do."""
    try:
        room = os.statvfs("/dev/shm")
    except OSError:
        return Finding("/dev/shm", "note", "does not exist", "required only by DataLoader(num_workers > 0)")
    total = room.f_blocks * room.f_frsize
    if total < 256_000_000:
        advice = "enough for Rainband; DataLoader(num_workers > 0) requires docker run --shm-size=1g"
        return Finding("/dev/shm", "note", size(total), advice)
    return Finding("/dev/shm", "ok", size(total))


def _torch() -> Finding:
    try:
        import torch
    except Exception as error:  # a broken installation may raise anything
        advice = "pip install torch==2.13.0"
        return Finding("torch", "missing", f"cannot be imported: {type(error).__name__}: {error}", advice)
    threads = f"{torch.get_num_threads()} threads by default (Rainband sets --threads in each worker)"
    gpu = f", {torch.cuda.device_count()} GPUs" if torch.cuda.is_available() else ""
    capability = torch.backends.cpu.get_cpu_capability()
    return Finding("torch", "ok", f"{torch.__version__}, {capability}{gpu}, {threads}")


def _loopback() -> Finding:
    from rainband.transports.connect import listen_tcp

    try:
        with listen_tcp("127.0.0.1") as listener:
            port = listener.getsockname()[1]
    except (OSError, ValueError) as error:
        return Finding("loopback", "missing", str(error), "enable the interface: ip link set lo up")
    return Finding("loopback", "ok", f"127.0.0.1 has free ports (such as {port})")


def _local_sockets() -> Finding:
    from rainband.transports.connect import listen_unix

    try:
        listen_unix(f"rainband-doctor-{os.getpid()}").close()
    except OSError as error:
        return Finding("local sockets", "missing", str(error), "the system must allow abstract Unix sockets")
    return Finding("local sockets", "ok", "abstract Unix sockets work")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "any number" if hard == resource.RLIM_INFINITY else whole(hard)
    found = f"{whole(soft)} at once (up to {most} can be allowed)"
    if soft != resource.RLIM_INFINITY and soft < FEW_FILES:
        return Finding("open files", "note", found, f"ulimit -n {4 * FEW_FILES}")
    return Finding("open files", "ok", found)


def _libraries() -> Iterator[Finding]:
    """Check the libraries that Rainband requires, then those of each extra."""
    from importlib import metadata

    try:
        needed = metadata.requires("rainband") or []
    except metadata.PackageNotFoundError:
        advice = "pip install -e . in its directory"
        yield Finding("libraries", "note", "rainband is not installed, so its requirements are unknown", advice)
        return
    required: dict[str, list[str]] = {"": []}
    for requirement in needed:
        name = re.match(r"[\w.-]+", requirement)
        extra = re.search(r"""extra\s*==\s*["']([\w-]+)["']""", requirement)
        if name:
            required.setdefault(extra[1] if extra else "", []).append(name[0])
    for group, names in required.items():
        yield _group(group, names)


def _group(extra: str, names: list[str]) -> Finding:
    missing = [name for name in names if _version(name) is None]
    title = f"extra {extra}" if extra else "libraries"
    if not missing:
        return Finding(title, "ok", ", ".join(f"{name} {_version(name)}" for name in names))
    if not extra:
        return Finding(title, "missing", f"{', '.join(missing)} not installed", "pip install rainband")
    return Finding(title, "note", f"{', '.join(missing)} not installed", f"pip install 'rainband[{extra}]'")


def _version(name: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
