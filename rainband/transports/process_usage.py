"""The processor time and the memory that this process uses."""

from __future__ import annotations

import os
import time
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def process_usage() -> tuple[float, int]:
    """Return seconds of the processor so far, and bytes of memory now, without files and shared memory; 0: not known."""
    try:
        _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    except OSError:
        return time.process_time(), 0
    return time.process_time(), (int(resident) - int(shared)) * PAGE_BYTES
