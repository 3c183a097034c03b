"""One gradient, from the batch it came from to the parameters it changed: read this to find your way in the code.

There is one worker and one server here, and nothing between them: what the worker sends is handed to the server by
the test. The model is w . x with two weights, the data are four samples, so every number can be checked by hand.

Each step below is one file:

    protocol/data_plan.py        the samples of a batch, and the ID of a push
    coordinator/coordinator.py   the worker that may compute it
    worker/worker.py             the gradient
    worker/client.py             one message per block
    server/server.py             accepted, or refused with a reason
    rules/                       when it is applied
    server/block.py              the step, and the values that readers see
    protocol/accounting.py       the outcome of each batch
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rainband.coordinator.coordinator import Coordinator, RunSettings
from rainband.model.flat_parameters import Flat
from rainband.protocol.data_plan import BatchRange
from rainband.protocol.layout import BlockSpec
from rainband.protocol.messages import (
    COORDINATOR,
    Ack,
    Address,
    Assign,
    Go,
    InitBlock,
    Join,
    Lease,
    LeaseEnd,
    LeaseRequest,
    Message,
    Params,
    Peer,
    Pull,
    Push,
    PushResult,
    Ready,
    Report,
    Return,
    ServerJoin,
    Welcome,
)
from rainband.protocol.parameter_buffers import ParameterBuffer
from rainband.protocol.ports import BlockValues
from rainband.server.server import Server
from rainband.strategies.downpour import Downpour
from rainband.strategy import Batch
from rainband.tasks.task import TensorData
from rainband.worker.client import Client
from rainband.worker.worker import ModuleWorker

WORKER, SERVER = Peer("worker", 0), Peer("server", 0)
STRATEGY = Downpour(lr=0.5, optimizer="sgd")
SAMPLES = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 4.0], [0.0, 8.0]])


class Slope:
    """The task: the loss is the mean of w . x, so its gradient is the mean of x."""

    batch_size = 1
    epochs = 1

    def model(self) -> nn.Module:
        model = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def data(self) -> TensorData:
        return TensorData(SAMPLES)

    def loss(self, model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        loss: Tensor = model(batch[0]).mean()
        return loss

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {}


class Wire:
    """A port that keeps what is sent, so that the test can look at it before it hands it on."""

    direct = False  # the server's memory is not ours to read: we ask, and the values come with the answer

    def __init__(self) -> None:
        self.sent: list[tuple[Message, Tensor | None]] = []

    def send(self, message: Message) -> None:
        self.sent.append((message, None))

    def push(self, message: Push | InitBlock, values: BlockValues) -> None:
        payload = torch.empty(message.numel)
        values.write(payload)  # the one copy: from where autograd left the gradient to where it is sent from
        self.sent.append((message, payload))

    def read(self, spec: BlockSpec, at_version: int, out: Tensor) -> int | None:
        raise AssertionError("only shared memory is read in place")


def test_one_gradient() -> None:
    # ---- before it: the coordinator makes the plan, and knows who is there ----------------------------------------

    coordinator = Coordinator(RunSettings(num_workers=1, num_servers=1))
    task = Slope()
    module = task.model()
    flat = Flat(module, [{"params": list(module.parameters())}])  # from now on the parameters lie in one vector

    assert coordinator.receive(SERVER, ServerJoin(Address("here", 0)), now=0.0) == []
    join = Join("fingerprint", 4, flat.layout, batch_size=1, epochs=1, batches_per_item=1, rounds=False)
    to_server, to_worker = coordinator.receive(WORKER, join, now=0.0)

    welcome, assign = to_worker.message, to_server.message
    assert isinstance(welcome, Welcome) and isinstance(assign, Assign)
    plan = welcome.plan
    assert (plan.num_batches, plan.num_portions) == (4, 4)
    (block,) = welcome.blocks  # a small model is one block: two weights, and zeros up to the next 64 bytes
    assert block.numel == 16 and welcome.owners == (0,)

    # ---- the server makes its blocks; the first worker gives them their first values ------------------------------

    def publish(specs: tuple[BlockSpec, ...], buffers: int) -> list[ParameterBuffer]:
        return [ParameterBuffer([0], 0, [torch.zeros(spec.numel) for _ in range(buffers)]) for spec in specs]

    server = Server(STRATEGY.server, publish)  # type: ignore[arg-type]
    assert server.receive(COORDINATOR, assign) == []

    wire, told = Wire(), list[Message]()
    client = Client(WORKER, plan, flat, welcome.blocks, welcome.owners, [wire], told.append)
    assert welcome.load
    client.load()
    (load,) = wire.sent
    outs = server.receive(WORKER, *load)
    assert outs[-1].message == Ready()
    (go,) = coordinator.receive(SERVER, Ready(), now=0.0)
    assert go.message == Go()

    # ---- 1. the worker asks for something to do, and is leased a portion -------------------------------------------

    assert client.next_item() is None  # nothing yet; but now it has asked
    assert told.pop() == LeaseRequest()
    (out,) = coordinator.receive(WORKER, LeaseRequest(), now=0.0)
    assert out.message == Lease(portion=0, lease=1, groups=((0,),))
    client.receive(out.message)
    work_item = client.next_item()
    assert work_item is not None and work_item.batches == (Batch(portion=0, k=0, lease=1),)

    # ---- 2. the gradient: a function of the parameters and of the batch's name, nothing else -----------------------

    worker = ModuleWorker(0, 1, task, task.data(), module, client)
    (sample,) = worker.sampler.indices(work_item.batches[0])
    gradient = worker.compute(work_item.batches[0])
    (slope,) = gradient.tensors
    assert slope is not None and slope[0].tolist() == SAMPLES[sample].tolist()

    # ---- 3. the push: one message per block, named by the batches it sums ------------------------------------------

    wire.sent.clear()
    handle = client.push(gradient)
    ((push, payload),) = wire.sent
    assert isinstance(push, Push) and payload is not None
    assert push.push_id == (BatchRange(portion=0, first=0, last=1, lease=1),)
    assert (push.block, push.worker, push.samples, push.version) == (0, 0, 1, 0)
    assert payload[:2].tolist() == SAMPLES[sample].tolist() and payload[2:].count_nonzero() == 0

    # ---- 4. the server accepts it; the rule applies it at once, for that is Downpour -------------------------------

    outs = server.receive(WORKER, push, payload)
    ack, report = (out.message for out in outs)
    assert isinstance(ack, Ack) and (ack.result, ack.version) == (PushResult.ACCEPTED, 1)
    held = server.blocks[0]
    assert held.values[:2].tolist() == (-0.5 * SAMPLES[sample]).tolist()  # w = 0 - lr * gradient
    assert held.buffer.words[0] == 2 * held.version  # even: nobody is writing

    # ---- 5. if it comes again it was had: nothing changes ----------------------------------------------------------

    again = server.receive(WORKER, push, payload)[0].message
    assert isinstance(again, Ack) and (again.result, again.version) == (PushResult.DUPLICATE, 1)
    assert held.values[:2].tolist() == (-0.5 * SAMPLES[sample]).tolist()

    # ---- 6. the answer ends the push, and with its last batch the lease --------------------------------------------

    assert not handle.ready()
    client.receive(ack)
    assert handle.ready()
    assert told.pop() == Return(portion=0, lease=1, reason=LeaseEnd.DONE)

    # ---- 7. done is what the marks say: the server has told the coordinator so by itself ---------------------------

    assert isinstance(report, Report) and (report.first_open, report.accepted) == (1, 1)
    coordinator.receive(SERVER, report, now=0.0)
    assert coordinator.state.batches_done() == 1
    accounting = coordinator.reporting.accounting()
    assert accounting is not None and (
        accounting.applied,
        accounting.not_processed,
        accounting.lost,
        accounting.applied_twice,
    ) == (1, 3, 0, 0)

    # ---- 8. the next pull brings it back: beside the parameters first, then in their place -------------------------

    wire.sent.clear()
    pull = client.pull()
    ((question, _),) = wire.sent
    assert isinstance(question, Pull)
    (reply,) = server.receive(WORKER, question)
    assert isinstance(reply.message, Params)
    params, values = server.read(reply.message)  # read when the bytes leave, not when they were asked for
    client.receive(params, values)
    assert flat.vectors[0].count_nonzero() == 0  # it has come, but nobody has waited for it yet

    assert pull.ready()
    assert next(module.parameters())[0].tolist() == (-0.5 * SAMPLES[sample]).tolist()
    assert client.pulls.versions == [1]
