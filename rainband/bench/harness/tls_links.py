"""The model of a cluster whose machines are joined by links with TLS, for predictions of runs on several machines."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import replace

from rainband.runtimes.simulation.models.cluster_model import ClusterModel
from rainband.runtimes.simulation.models.network import NetworkModel
from rainband.transports.tls.certificate import client_context, new_certificate, server_context
from rainband.transports.tls.tls_socket import TlsSocket

DATA_OF_FRAME = 1448 / 1514  # bytes of data, and all bytes, of an Ethernet frame
LATENCY_S = 100e-6
MEASURED_BYTES = 1 << 26


def with_tls_links(costs: ClusterModel, mbit: int, tls_bytes_per_s: float) -> ClusterModel:
    """Return the costs of nodes on machines of their own: a node encrypts what it sends, and decrypts what arrives."""
    nodes = costs.nodes

    def with_tls(bytes_per_s: float) -> float:
        return 1 / (1 / bytes_per_s + 1 / tls_bytes_per_s)

    return replace(
        costs,
        network=NetworkModel(LATENCY_S, mbit * 1e6 / 8 * DATA_OF_FRAME),
        nodes=replace(
            nodes,
            shared_memory=False,
            push_bytes_per_s=with_tls(nodes.push_bytes_per_s),
            pull_bytes_per_s=with_tls(nodes.pull_bytes_per_s),
            apply_bytes_per_s=with_tls(nodes.apply_bytes_per_s),
            read_bytes_per_s=with_tls(nodes.read_bytes_per_s),
        ),
    )


def measure_tls() -> float:
    """Return how many bytes per second of processor time one end of a connection encrypts or decrypts.

    Both ends run in this process, on two threads, and cost about the same.
    """
    certificate = new_certificate()
    ours, theirs = socket.socketpair()
    sender = TlsSocket(ours, client_context(), server_side=False)
    receiver = TlsSocket(theirs, server_context(certificate), server_side=True)

    def receive() -> None:
        receiver.shake_hands()
        receiver.trusted()
        buffer = bytearray(1 << 20)
        left = MEASURED_BYTES
        while left:
            left -= receiver.recv_into(buffer)

    thread = threading.Thread(target=receive)
    thread.start()
    sender.shake_hands()
    sender.trusted()
    chunk = bytes(1 << 20)
    began = time.process_time()
    for _ in range(MEASURED_BYTES // len(chunk)):
        sender.sendall(chunk)
    thread.join()
    took_s = time.process_time() - began
    sender.close()
    receiver.close()
    return 2 * MEASURED_BYTES / took_s
