"""Runs that Slurm or torchrun start: the environment, the shared invitation, and the scripts in `deploy/`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import typer

from rainband.cli.main import build_app
from rainband.runtimes.machines import launchers
from rainband.runtimes.machines.invitation import Invitation, read_invitation
from rainband.runtimes.machines.launchers import Launched, launched_by, shared_file
from rainband.runtimes.machines.reach import reach

DEPLOY = Path(__file__).parent.parent / "deploy"
SLURM = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "2", "SLURM_NTASKS": "4"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "MASTER_PORT": "29500"}
INVITATION = Invitation(
    run="r", run_id=bytes(16), host="h", port=1, unix="", machine="", fingerprint=bytes(32), key=bytes(32)
)


def test_ranks_are_those_of_slurm_or_torchrun() -> None:
    assert launched_by(SLURM) == Launched("Slurm", "77", 2, 4)
    assert launched_by(TORCHRUN) == Launched("torchrun", "none", 1, 2)
    assert launched_by({}) is None
    assert launched_by({"SLURM_JOB_ID": "77"}) is None  # a shell of salloc
    assert launched_by(SLURM | {"SLURM_NTASKS": "1"}) is None


def test_the_shared_file_has_the_name_of_the_job(tmp_path: Path) -> None:
    assert shared_file(Launched("Slurm", "77", 0, 4), {}) == Path("rainband-77.invite.txt")
    one = shared_file(Launched("torchrun", "a/b", 0, 2), {"RAINBAND_SHARED": str(tmp_path), "MASTER_PORT": "29500"})
    assert one == tmp_path / "rainband-a_b-29500.invite.txt"


def test_other_ranks_wait_for_the_invitation_of_rank_0(tmp_path: Path) -> None:
    environment = SLURM | {"RAINBAND_SHARED": str(tmp_path)}
    said: list[str] = []
    is_waiting = threading.Event()

    def say(line: str) -> None:
        said.append(line)
        is_waiting.set()

    def rank_0() -> None:
        is_waiting.wait()
        INVITATION.write(tmp_path / "rainband-77.invite.txt")

    thread = threading.Thread(target=rank_0)
    thread.start()
    assert read_invitation(None, environment, say) == INVITATION
    thread.join()
    assert said == [
        f"rank 2 of 4 (Slurm job 77): waiting for the invitation of rank 0, {tmp_path}/rainband-77.invite.txt ..."
    ]


def test_the_variable_with_the_invitation_is_not_passed_on() -> None:
    environment = {"RAINBAND_INVITE": INVITATION.text(), "PATH": "/bin"}
    assert read_invitation(None, environment) == INVITATION
    assert environment == {"PATH": "/bin"}


def test_an_invitation_that_is_typed_as_an_argument_is_refused_and_not_shown(tmp_path: Path) -> None:
    """Its key may contain a slash, as names of files do."""
    INVITATION.write(tmp_path / "invite.txt")
    typed = (tmp_path / "invite.txt").read_text().replace("key", "key/")
    for read in (read_invitation, lambda word: list(reach(word))):
        with pytest.raises(ValueError, match="must not be typed as an argument") as raised:
            read(typed)
        assert "key" not in str(raised.value)


def test_a_rank_that_finds_no_invitation_says_what_to_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(launchers, "LOOK_EVERY_S", 0.0)
    path = tmp_path / "rainband-77.invite.txt"
    with pytest.raises(ValueError, match="rank 0 has not written .* within 0 s: .* RAINBAND_SHARED names another"):
        launchers.await_file(path, Launched("Slurm", "77", 2, 4), lambda line: None, patience_s=0.0)
    with pytest.raises(ValueError, match="rank 0 of 4 .* coordinates: start the run there, with rainband train"):
        launchers.await_file(path, Launched("Slurm", "77", 0, 4), lambda line: None)


def parsed(words: list[str]) -> dict[str, Any]:
    """Return the options of a command, as the command line reads them."""
    name, *rest = words
    command = typer.main.get_command(build_app()).commands[name]  # type: ignore[attr-defined]
    return dict(command.make_context(name, rest).params)


def test_the_batch_script_starts_the_run_on_rank_0_and_joins_it_from_the_others(tmp_path: Path) -> None:
    """`srun` and `rainband` are programs of this test: each task writes what it would run."""
    programs = {
        "srun": 'while [[ "$1" == --* ]]; do shift; done\nfor i in 0 1 2; do SLURM_PROCID=$i SLURM_NTASKS=3 "$@"; done',
        "rainband": f"{sys.executable} -c 'import json, sys; print(json.dumps(sys.argv[1:]))' \"$@\" >> calls",
    }
    for name, text in programs.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "TASK": "my_lab:task", "WORKERS": "2"}
    subprocess.run(["bash", DEPLOY / "slurm.sbatch"], cwd=tmp_path, env=environment, check=True)
    first, *others = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    train = parsed(first)
    assert (train["task"], train["strategy"]) == ("my_lab:task", "downpour")
    assert (train["workers"], train["min_workers"]) == (2, 6) and train["listen"] == "0.0.0.0:7070"
    assert train["advertise"] == subprocess.check_output(["hostname", "-f"], text=True).strip()
    assert [(words[0], parsed(words)["workers"]) for words in others] == [("join", 2)] * 2


def test_the_services_of_the_compose_file_are_commands_of_one_job() -> None:
    yaml = pytest.importorskip("yaml", reason="the compose file is YAML: pip install pyyaml")
    text = (DEPLOY / "compose.yaml").read_text()
    for variable, default in (("${TASK:-digits}", "digits"), ("${STRATEGY:-downpour}", "downpour")):
        text = text.replace(variable, default)
    services = yaml.safe_load(text)["services"]
    jobs = {name: launched_by(service["environment"]) for name, service in services.items()}
    assert jobs == {
        name: Launched("torchrun", "compose", rank, 3) for rank, name in enumerate(("run", "second", "third"))
    }
    commands = {name: service["command"].split()[1:] for name, service in services.items()}
    train = parsed(commands["run"])
    assert (train["listen"], train["min_workers"], train["workers"]) == ("run:7070", 3, 1)
    assert parsed(commands["second"])["workers"] == parsed(commands["third"])["workers"] == 1
