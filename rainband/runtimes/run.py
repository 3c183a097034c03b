"""The frame of a run in every runtime: its directory, events, phases, result and exit code."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import safetensors

from rainband import __version__
from rainband.coordinator.coordinator import Coordinator, RunSettings
from rainband.coordinator.state import Target
from rainband.protocol import events
from rainband.protocol.saved_state import Restore
from rainband.runtimes.checkpoints.place import restore_of
from rainband.runtimes.config import RunConfig
from rainband.runtimes.result import judged
from rainband.runtimes.run_directory import EventLog, write_config

MODEL_FILE = "model.safetensors"
View = Callable[[events.AnyEvent], None]


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run: the last line of `rainband train --json`."""

    outcome: str  # finished, stopped, failed
    reason: str
    strategy: str
    task: str
    workers: int
    servers: int
    samples: int
    seconds: float  # from the start of the first process to the end
    training_s: float = 0.0  # of these, from the start of the first step to the end of the last one
    samples_per_s: float  # during training
    metrics: dict[str, float]
    accounting: dict[str, Any]
    staleness: dict[str, Any]
    directory: str
    checkpoint: str = ""  # the name of the last one
    cpu_s: float = 0.0  # of the processor, by all processes together; 0 in a simulation
    exit_code: int = 0


Result = TypeVar("Result", bound=RunResult)


class Phases:
    """Passes on the coordinator's events, and adds one when its phase changes."""

    def __init__(self, coordinator: Coordinator, emit: View, now: Callable[[], float]) -> None:
        self.coordinator = coordinator
        self.emit = emit
        self.now = now
        self.phase = coordinator.state.phase  # the last one that was shown

    def show(self) -> None:
        coordinator, changed = self.coordinator, self.coordinator.state.phase != self.phase
        if changed and coordinator.state.phase == "concluding":
            coordinator.reporting.report_progress(
                self.now(), last=True
            )  # every worker has reported its last statistics
        for event in coordinator.state.take_events():
            self.emit(event)
        if changed:
            self.phase = coordinator.state.phase
            self.emit(events.PhaseChanged(at_s=self.now(), phase=self.phase, reason=coordinator.state.reason))


class Run:
    """The frame of a run. A runtime starts the nodes and runs them between `begin` and `end`."""

    log: EventLog
    shares_batches = False  # the workers share each batch

    def __init__(self, config: RunConfig, view: View) -> None:
        self.config = config
        self.view = view
        self.directory = Path(config.directory).absolute()  # the user's code may change the working directory
        self.restore = restore_of(config)

    @property
    def settings(self) -> RunSettings:
        return settings_of(self.config, str(self.directory / MODEL_FILE), self.restore)

    def emit(self, event: events.AnyEvent) -> None:
        self.log.write(event)
        self.view(event)

    def begin(self, started_at: str = "", clock_s: float = 0.0) -> None:
        """Open the log, write the configuration, and emit the first event."""
        config = self.config
        self.log = EventLog(self.directory)
        write_config(self.directory, config)
        self.emit(
            events.RunStarted(
                at_s=0.0,
                task=config.task,
                strategy=config.strategy,
                settings=dict(config.strategy_settings),
                num_workers=config.num_workers,
                num_servers=config.num_servers,
                version=__version__,
                target=config.target,
                shares_batches=self.shares_batches,
                started_at=started_at,
                copies=config.copies,
                clock_s=clock_s,
            )
        )

    def result(
        self,
        kind: type[Result],
        coordinator: Coordinator,
        seconds: float,
        exit_code: int | None = None,
        stopped: str = "",
        **more: Any,
    ) -> Result:
        """Return the result. `exit_code`: of an interrupted run; `stopped`: the reason why its end was not awaited."""
        config, accounting, samples = (
            self.config,
            coordinator.reporting.accounting(),
            coordinator.reporting.samples_done(),
        )
        training_s = self.log.training.seconds
        outcome, reason = judged(coordinator.state.outcome, coordinator.state.reason, accounting, config)
        if stopped:
            outcome, reason = "stopped", stopped
        return kind(
            outcome=outcome,
            reason=reason,
            strategy=config.strategy,
            task=config.task,
            workers=config.num_workers,
            servers=config.num_servers,
            samples=samples,
            seconds=seconds,
            training_s=training_s,
            samples_per_s=max(0, samples - self._restored_samples()) / (training_s or seconds) if seconds else 0.0,
            metrics=coordinator.shutdown.metrics,
            accounting=msgspec.to_builtins(accounting) if accounting else {},
            staleness=msgspec.to_builtins(coordinator.reporting.staleness(), str_keys=True),
            directory=config.directory,
            checkpoint=coordinator.checkpoints.last_name,
            cpu_s=coordinator.reporting.cpu_s() + self.own_cpu_s(),
            exit_code=int(outcome == "failed") if exit_code is None else exit_code,
            **more,
        )

    def own_cpu_s(self) -> float:
        """Return the seconds of the processor that the coordinator's process has used for the run."""
        return 0.0

    def _restored_samples(self) -> int:
        """Return the samples of the checkpoint from which the run continues."""
        return 0 if self.restore is None else self.restore.samples

    def save_rescued(self, coordinator: Coordinator) -> None:
        """Save the model that the coordinator has fetched from the servers because no worker could save it."""
        rescue, state = coordinator.shutdown.rescue, coordinator.state
        path = self.directory / MODEL_FILE
        if not rescue.is_complete or path.is_file():
            return
        from rainband.model.save import save_blocks  # imports torch

        assert state.join is not None and state.welcome is not None
        reason = state.reason.rstrip(".")
        elsewhere = Path(tempfile.gettempdir()) / f"{self.directory.name}.safetensors"  # if the disk is full
        for file in (path, elsewhere):
            with suppress(OSError, safetensors.SafetensorError):
                save_blocks(state.join.layout, state.welcome.blocks, rescue.values, str(file))
                state.reason = f"{reason}. The parameters that the servers have are saved in {file}, without buffers."
                return
        state.reason = f"{reason}. The model could be saved neither as {path} nor as {elsewhere}."

    def end(self, result: RunResult) -> None:
        """Emit the last event. The owner of the run closes its log, once."""
        self.emit(
            events.RunEnded(
                at_s=result.seconds,
                outcome=result.outcome,
                reason=result.reason,
                seconds=result.seconds,
                training_s=result.training_s,
                samples=result.samples,
                metrics=result.metrics,
                accounting=result.accounting,
                staleness=result.staleness,
                checkpoint=result.checkpoint,
                cpu_s=result.cpu_s,
            )
        )


def target_of(config: RunConfig) -> Target | None:
    """Return the target that was typed as METRIC=VALUE."""
    name, _, value = config.target.partition("=")
    return Target(name, float(value)) if config.target else None


def settings_of(config: RunConfig, model_path: str, restore: Restore | None = None) -> RunSettings:
    """Return the settings of the coordinator."""
    return RunSettings(
        num_workers=config.num_workers,
        num_servers=config.num_servers,
        seed=config.seed,
        failure_timeout_s=config.failure_timeout_s,
        stuck_timeout_s=config.stuck_timeout_s,
        model_path=model_path,
        optimizers=config.optimizers,
        num_local=config.num_local,
        joinable=bool(config.listen),
        restarts=config.stage_plan is not None,
        min_workers=config.min_workers,
        copies=config.copies,
        checkpoint_every_s=config.checkpoint_every_s,
        restore=restore,
        target=target_of(config),
        workers_per_replica=config.stage_plan.size if config.stage_plan else 1,
    )
