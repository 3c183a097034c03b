"""The coordinator: one class per responsibility; coordinator.py passes each message to the one that it concerns.

All share the `RunState`. A class may call those above it in this list: state, reporting, shutdown, full_batch, leases,
liveness, planning, admission, divergence_guard.
"""
