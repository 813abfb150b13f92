"""How many threads compute: as many as are asked for in the thread that asks, one in every other.

Compiled kernels have a team of their own (kernels/cpu/team.h), beside which torch computes with one thread: two teams
would wait for each other's processors (decision 0141). Without compiled kernels it is torch that has them.
"""

import threading

import torch

from kernels.cpu.library import call, variant


def use_threads(number: int) -> None:
    """Let the calling thread compute with so many threads, itself included."""
    if variant() is not None:
        call("use_threads", number)
        torch.set_num_threads(1)
        return
    torch.set_num_threads(number)
    # torch takes the last number that any thread has set for threads that have not computed yet.
    others = threading.Thread(target=torch.set_num_threads, args=(1,))
    others.start()
    others.join()


def threads_in_use() -> int:
    """Threads that compute for the calling thread, itself included."""
    return torch.get_num_threads() if variant() is None else call("threads_in_use")
