"""How many cores there are to compute on, for those who share them."""

import os
import sys

import psutil


def usable_cores() -> int:
    """Physical cores that this process may run on: two threads of one core compute little more than one."""
    usable = len(os.sched_getaffinity(0)) if sys.platform == "linux" else psutil.cpu_count() or 1
    return max(1, min(usable, psutil.cpu_count(logical=False) or usable))
