"""A worker as a process: builds the task, joins the run, drives the strategy, and says goodbye."""

from __future__ import annotations

import sys
import traceback
from typing import Any

import torch
from torch import Tensor, nn

from rainband.catalogue import load_strategy
from rainband.client import Client
from rainband.errors import CoordinatorLost, RainbandError
from rainband.flat import Flat
from rainband.messages import (
    Address,
    Bye,
    Conclude,
    Concluded,
    Ended,
    Failed,
    Go,
    Join,
    Message,
    Opened,
    Peer,
    Welcome,
)
from rainband.optim import build
from rainband.stats import Stats
from rainband.tasks.load import load_task
from rainband.tasks.task import fingerprint, parameter_groups
from rainband.transports.control import Control
from rainband.transports.dial import can_share_memory, dial
from rainband.transports.ports import SharedPort, TcpPort
from rainband.transports.switchboard import Switchboard
from rainband.types import Port
from rainband.worker import ModuleWorker
from rainband.worlds.config import Job, decode_job
from rainband.worlds.drive import drive
from rainband.worlds.save import save_model


class Dismissed(Exception):
    """The coordinator has said goodbye."""


def main(job: bytes, fds: list[int]) -> None:
    """The entry of a worker's process."""
    process = WorkerProcess(decode_job(job))
    try:
        process.run()
    except Dismissed:
        return
    except CoordinatorLost:
        sys.exit(1)  # the launcher is gone, and with it whoever would read a message
    except RainbandError as error:
        process.fail(error, "")
        sys.exit(1)
    except Exception as error:
        process.fail(error, "".join(traceback.format_exception(*_without_our_frames(error))))
        sys.exit(1)


def _without_our_frames(error: BaseException) -> tuple[Any, Any, Any]:
    """The traceback from the user's own code on, where there is any."""
    trace = error.__traceback__
    inside = trace
    while inside is not None and "rainband" in inside.tb_frame.f_code.co_filename.replace("\\", "/").split(
        "/"
    ):
        inside = inside.tb_next
    return type(error), error, inside or trace


class WorkerProcess:
    """One worker's life."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.config = job.config
        self.me = Peer("worker", job.index)
        self.switchboard = Switchboard()
        self.stats = Stats()
        self.client: Client | None = None
        self.welcome: Welcome | None = None
        self.go = False
        self.early: list[Message] = []  # that came before there was a client
        self.conclude: tuple[Conclude, memoryview | None] | None = None
        address = job.coordinator
        timeout_s = self.config.failure_timeout_s
        sock, _, key = dial(address, bool(address.unix), job.secret, job.run_id, self.me, timeout_s)
        self.control = Control(sock, key, self.switchboard, self._from_coordinator, self.stats, timeout_s / 5)

    def run(self) -> None:
        strategy = load_strategy(self.config.strategy, self.config.strategy_settings)
        task = load_task(self.config.task, self.config.task_settings)
        torch.manual_seed(self.config.seed)
        module = task.model()
        data = task.data()
        flat = Flat(module, parameter_groups(task, module))
        half = strategy.server(self.config.num_workers)
        if half is not None:
            build(half.optimizer, [torch.zeros(1)])  # a wrong setting is told here, not by a server later
        self.control.send(
            Join(
                fingerprint=fingerprint(data),
                num_samples=len(data),
                layout=flat.layout,
                batch_size=self.config.batch_size or task.batch_size,
                epochs=self.config.epochs or task.epochs,
                cell_batches=getattr(strategy, "cell_batches", 1),
                rounds=getattr(strategy, "rounds", False),
                warm_batches=getattr(strategy, "warm_batches", 0),
            )
        )
        client = self._enter(flat)
        worker = ModuleWorker(self.job.index, self.config.num_workers, task, data, module, client)
        drive(strategy, worker, self.switchboard.wait)
        self._leave(worker)

    def _enter(self, flat: Flat) -> Client:
        while self.welcome is None:
            self.switchboard.wait()
        welcome = self.welcome
        ports = [self._port(i, address, welcome) for i, address in enumerate(welcome.servers)]
        self.client = Client(
            self.me, welcome.plan, flat, welcome.blocks, welcome.owners, ports, self.control.send
        )
        self.client.stats = self.stats
        for message in self.early:  # the run may be at its end before we have entered it
            self.client.receive(message)
        loaded = False
        while not self.go:
            if self.welcome.load and not loaded:
                loaded = True
                self.client.load()
            self.switchboard.wait()
        return self.client

    def _port(self, index: int, address: Address, welcome: Welcome) -> Port:
        peer = Peer("server", index)
        shared = can_share_memory(address) and self.config.transport != "tcp"
        if self.config.transport == "shm" and not shared:
            raise ValueError(
                f"{peer} is not on this machine, or memory cannot be shared here: use --transport tcp."
            )
        specs = [welcome.blocks[b] for b, owner in enumerate(welcome.owners) if owner == index]
        sock, _, key = dial(
            address, shared, self.job.secret, self.job.run_id, self.me, self.config.failure_timeout_s
        )
        if shared:
            return SharedPort(peer, sock, key, specs, self.switchboard, self._from_server, self.stats)
        return TcpPort(peer, sock, key, specs, self.switchboard, self._from_server)

    def _from_server(self, message: Message, payload: Tensor | None) -> None:
        if self.client is not None and not isinstance(message, Opened):
            self.client.receive(message, payload)

    def _from_coordinator(self, message: Message, body: memoryview | None) -> None:
        match message:
            case Bye():
                if message.reason and self.client is None:
                    print(message.reason, file=sys.stderr)
                raise Dismissed
            case Welcome():
                self.welcome = message
            case Go():
                self.go = True
            case Conclude():
                self.conclude = message, body
            case _:
                if self.client is None:
                    self.early.append(message)
                else:
                    self.client.receive(message)

    def _leave(self, worker: ModuleWorker) -> None:
        """The strategy has returned: wait for the last answers, hand over the buffers, save if asked to."""
        assert self.client is not None
        while self.client.pushes:
            self.switchboard.wait()
        self.client.give_all_back("stopped")
        self.control.send(self.stats.beat())
        self.control.send(Ended(self.stats.samples), worker.buffers())
        while True:
            if self.conclude is not None:
                conclude, body = self.conclude
                self.conclude = None
                self.control.send(Concluded(self._save(worker, conclude, body)))
            self.switchboard.wait()

    def _save(self, worker: ModuleWorker, conclude: Conclude, body: memoryview | None) -> dict[str, float]:
        client = worker.client
        if client.blocks and client.ports:
            pull = client.pull_latest()
            while not pull.ready():
                self.switchboard.wait()
        if body is not None:
            worker.set_buffers(body)
        module: nn.Module = worker.module
        module.eval()
        metrics = {name: float(value) for name, value in worker.task.evaluate(module).items()}
        save_model(module, conclude.path)
        return metrics

    def fail(self, error: BaseException, trace: str) -> None:
        """Tell the coordinator what went wrong; it ends the run and shows it once."""
        try:
            self.control.send(Failed(self.stats.steps, f"{type(error).__name__}: {error}", trace))
            while True:
                self.switchboard.wait(self.config.failure_timeout_s)
        except (Dismissed, RainbandError):
            return
