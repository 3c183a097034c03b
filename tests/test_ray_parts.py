"""Parts of a run on Ray, without a cluster: places, the user's code, options, and the host of a process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

import rainband
from rainband.cli.options import numbers_by_name
from rainband.options import OptionError, RunOptions, on_command_line
from rainband.protocol.messages import Address, Software
from rainband.runtimes.config import Job, RaySettings, RunConfig, encode_job
from rainband.runtimes.configure import configure
from rainband.runtimes.machines.software import own_software
from rainband.runtimes.ray.cluster import actor_options, connected, groups_of_workers, import_ray, within
from rainband.runtimes.ray.role_host import HostedEnd, HostOrder, RoleHost
from rainband.runtimes.ray.user_code import LOCK, PREFIX, UnpackedCode, code_folders, pack, remove_orphans
from tests.processes import ROOT

CPU = {"CPU": 1.0}


# ---- places ----


@pytest.mark.parametrize(
    ("workers", "need", "nodes", "servers", "groups"),
    [
        (4, CPU, [{"CPU": 8}], 2, [4]),  # all together
        (4, CPU, [{"CPU": 3}, {"CPU": 3}], 2, [2, 2]),  # each node keeps one place for a server
        (5, CPU, [{"CPU": 4}] * 3, 3, [3, 2]),
        (3, {"CPU": 1, "GPU": 1}, [{"CPU": 64, "GPU": 2}], 0, [2, 1]),  # the scarcest resource counts
        (2, {"CPU": 1, "lidar": 1}, [{"CPU": 8}], 0, [1, 1]),  # no node has it: perhaps one will be added
        (2, {"CPU": 0.0}, [{"CPU": 8}], 0, [1, 1]),
        (2, CPU, [], 1, [1, 1]),
        (0, CPU, [{"CPU": 8}], 1, []),
    ],
)
def test_workers_are_placed_together_as_far_as_they_fit_on_a_node(
    workers: int, need: dict[str, float], nodes: list[dict[str, float]], servers: int, groups: list[int]
) -> None:
    assert groups_of_workers(workers, need, nodes, servers) == groups


def test_resources_are_passed_to_ray_under_its_names() -> None:
    assert actor_options({"CPU": 2, "GPU": 0.5}) == {"num_cpus": 2, "num_gpus": 0.5}
    assert actor_options({"lidar": 1, "memory": 1e9}) == {"num_cpus": 0, "memory": 1e9, "resources": {"lidar": 1}}


def test_a_worker_needs_a_processor_for_each_thread_unless_it_is_told_otherwise() -> None:
    assert RaySettings().worker_needs(threads=3) == {"CPU": 3}
    assert RaySettings(worker_resources={"CPU": 0.5, "GPU": 1}).worker_needs(3) == {"CPU": 0.5, "GPU": 1}
    assert RaySettings().server_needs() == {"CPU": 1}


# ---- the user's code ----


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder; the folder for temporary files is beside it."""
    folder = tmp_path / "lab"
    (folder / "parts").mkdir(parents=True)
    (folder / "venv" / "lib").mkdir(parents=True)
    (folder / ".git").mkdir()
    (tmp_path / "temporary").mkdir()
    files = {"lab_task_of_ray.py": "from parts.one import x", "parts/one.py": "x = 1", "labels.json": "[1]"}
    left_out = {
        ".git/config": "",
        "venv/pyvenv.cfg": "",
        "venv/lib/big.py": "",
        ".secret": "",
        "data.bin": "0" * (1 << 21),
    }
    for name, text in (files | left_out).items():
        (folder / name).write_text(text)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    return folder


def test_code_travels_without_hidden_files_environments_and_data(folder: Path) -> None:
    code = UnpackedCode(pack([folder]))
    (root,) = map(Path, code.folders)
    found = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    assert found == {"lab_task_of_ray.py", "parts/one.py", "labels.json"}
    code.close()
    assert not code.root.exists()


def test_the_code_of_a_killed_process_is_removed_and_that_of_a_living_one_stays(folder: Path) -> None:
    living, killed = UnpackedCode(pack([folder])), UnpackedCode(pack([folder]))
    killed.lock.close()  # as the kernel does
    remove_orphans()
    assert living.root.exists() and not killed.root.exists()
    living.close()


def test_a_foreign_folder_stays(folder: Path) -> None:
    other = folder.parent / "temporary" / f"{PREFIX}other"
    other.mkdir()
    remove_orphans()
    assert other.exists() and not (other / LOCK).exists()


def test_too_much_code_is_refused_with_what_to_do(folder: Path) -> None:
    for number in range(70):
        (folder / f"large_{number}.txt").write_text("0" * (1 << 20))
    with pytest.raises(OptionError, match="holds more than 64 MB of small files.*start the run in a folder"):
        pack([folder])


def test_code_is_that_of_the_current_folder_and_of_the_script(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main = ModuleType("__main__")
    main.__file__ = str(folder / "parts" / "one.py")
    monkeypatch.chdir(folder)
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert code_folders() == [folder, folder / "parts"]
    main.__file__ = str(Path(sys.prefix, "bin", "rainband"))  # installed, so it is on the nodes, too
    assert code_folders() == [folder]


# ---- options ----


def of_run(**options: object) -> RunConfig:
    base = RunConfig(task="digits", strategy="downpour", num_workers=4, num_servers=2)
    return configure(base, rainband.Downpour(), RunOptions(**options))  # type: ignore[typeddict-item]


def test_the_options_of_ray_are_settings_of_the_run_and_repeated_with_it() -> None:
    config = of_run(
        runtime="ray", address="auto", max_workers=8, worker_resources={"GPU": 1}, runtime_env={"pip": ["x"]}
    )
    wanted = RaySettings(address="auto", max_workers=8, worker_resources={"GPU": 1}, runtime_env={"pip": ["x"]})
    assert config.ray == wanted
    assert configure(config, rainband.Downpour(), {}).ray == wanted
    assert configure(config, rainband.Downpour(), {"runtime": "processes", "workers": 2}).num_workers == 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"address": "auto"}, "--address requires --runtime ray."),
        ({"max_workers": 8}, "--max-workers requires --runtime ray."),
        ({"runtime": "ray", "workers": 8, "max_workers": 4}, "--max-workers 4 must be at least --workers 8."),
        ({"runtime": "ray", "timeline": True}, "--timeline is for one machine, so omit it with --runtime ray."),
        ({"runtime": "ray", "transport": "shm"}, "--runtime ray: --record and --transport shm are for one machine."),
        (
            {"runtime": "ray", "worker_resources": {"GPU": -1}},
            "--worker-resources: GPU=-1 must be a number of at least 0.",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, object], text: str) -> None:
    with pytest.raises(OptionError) as raised:
        of_run(**options)
    assert raised.value.written(on_command_line) == text


def test_a_strategy_that_needs_one_machine_is_refused() -> None:
    base = RunConfig(task="digits", strategy="single", num_workers=1, num_servers=0)
    with pytest.raises(OptionError, match='runtime="ray": single works on one machine only; choose downpour'):
        configure(base, rainband.Single(), {"runtime": "ray"})


def test_the_default_strategy_needs_no_servers_on_ray() -> None:
    base = RunConfig(task="digits", strategy="sync", num_workers=4, num_servers=2)
    assert configure(base, rainband.Sync(), {"runtime": "ray"}).num_servers == 0
    base = RunConfig(task="digits", strategy="all_reduce", num_workers=4, num_servers=0)
    with pytest.raises(OptionError, match="sums gradients in memory that workers of one machine share"):
        configure(base, rainband.AllReduce(), {"runtime": "ray"})


def test_checkpoints_are_written_as_without_ray() -> None:
    assert of_run(runtime="ray").checkpoint_every_s == 300
    assert of_run(runtime="ray", checkpoint_every="1h").checkpoint_every_s == 3600


def test_a_range_of_workers_is_for_ray() -> None:
    with pytest.raises(OptionError, match='max_workers requires runtime="ray"'):
        rainband.fit("digits", "downpour", workers=(2, 8))
    with pytest.raises(OptionError, match=r"give a number, or the smallest and the largest, such as \(4, 32\)"):
        rainband.fit("digits", "downpour", workers=(2, 4, 8), runtime="ray")  # type: ignore[arg-type]


def test_resources_are_typed_as_names_and_numbers() -> None:
    assert numbers_by_name("worker_resources", "CPU=2, GPU=0.5") == {"CPU": 2, "GPU": 0.5}
    with pytest.raises(OptionError, match="write names and numbers, such as CPU=2,GPU=1"):
        numbers_by_name("worker_resources", "2 GPUs")


# ---- Ray itself ----


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(OptionError, match=r"requires Ray, which .*: type pip install 'rainband\[ray\]'"):
        import_ray()


def test_a_ray_with_known_holes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    old = ModuleType("ray")
    old.__version__ = "2.53.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", old)
    with pytest.raises(OptionError, match=r"requires Ray 2\.54 or later, and 2\.53\.0 is installed"):
        import_ray()
    old.__version__ = "2.54.0"  # type: ignore[attr-defined]
    assert import_ray() is old


def test_a_ray_client_is_refused_because_workers_cannot_reach_it() -> None:
    with pytest.raises(OptionError, match="a Ray client cannot be reached by the workers"), connected("ray://lab:1", 1):
        raise AssertionError("it was accepted")


def test_ray_is_imported_only_for_runs_on_ray() -> None:
    program = "import sys, rainband.cli.train, rainband.runtimes.ray.launcher; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_end_of_a_run_does_not_wait_for_a_lost_cluster() -> None:
    over = threading.Event()
    assert within(60.0, lambda: None)
    assert not within(0.0, over.wait)
    over.set()


# ---- the host of a process ----


def order(software: Software | None = None, timeout_s: float = 60.0) -> bytes:
    return msgspec.msgpack.encode(
        HostOrder(
            modules=(),
            failure_timeout_s=timeout_s,
            software=software or own_software(),
            folder=str(ROOT),
            path=tuple(sys.path),
        )
    )


def job() -> bytes:
    config = RunConfig(task="digits", strategy="downpour", num_workers=1, num_servers=1)
    return encode_job(Job(role="worker", index=0, run_id=b"", keys={}, coordinator=Address("", 0), config=config))


def leave_with_code_3(job: bytes, fds: list[int]) -> None:
    """An entry of a process."""
    assert os.pread(fds[0], 100, 0) == b"inherited"
    raise SystemExit(3)


def end_of(host: RoleHost) -> None:
    host.stop(0.0)
    host.output.close()


@pytest.mark.processes
def test_a_host_runs_a_process_with_the_files_that_it_inherits(monkeypatch: pytest.MonkeyPatch, warm: None) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", sys.path[:])
    host = RoleHost(order(), b"")
    try:
        entry = "tests.test_ray_parts:leave_with_code_3"
        for _ in range(2):  # and again, after its end
            end = msgspec.msgpack.decode(
                host.run_process(entry, job(), "rainband worker 0", 1, b"inherited"), type=HostedEnd
            )
            assert (end.code, end.signal) == (3, None)
    finally:
        end_of(host)


def test_a_node_with_other_versions_is_named() -> None:
    ours = own_software()
    host = RoleHost(order(msgspec.structs.replace(ours, torch="1.0")), b"")
    with pytest.raises(ValueError, match=f"torch {ours.torch} and the run's machine 1.0: install torch 1.0 on node"):
        host.run_process("", job(), "", 1)
    end_of(host)


@pytest.mark.processes
def test_a_host_whose_driver_is_silent_ends_and_says_why() -> None:
    program = f"""
        import threading
        from rainband.runtimes.ray.role_host import RoleHost
        RoleHost({order(timeout_s=0.5)!r}, b"")
        threading.Event().wait()
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, check=False)
    assert ended.returncode == 1
    assert "the driver of the run is lost: no heartbeat for 0.75 s, so nothing ends." in ended.stderr.decode()
