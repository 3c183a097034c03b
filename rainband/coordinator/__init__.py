"""What the coordinator has to do, one duty in each file; coordinator.py brings them what comes in.

All share the `Facts` of the run. A duty may call those above it in this list: facts, accounts, ending, leading,
leases, presence, planning, forming, guarding.
"""
