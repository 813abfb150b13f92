"""Which instructions a CPU's products use."""

import os
from functools import cache

import torch

VARIABLE = "ONEDNN_MAX_CPU_ISA"


@cache
def has_tiles() -> bool:
    """Whether oneDNN may multiply bf16 by AMX: many times as fast for many rows."""
    limit = chosen().upper()
    return torch.cpu._is_amx_tile_supported() and (limit in ("ALL", "DEFAULT") or "AMX" in limit)


def chosen() -> str:
    """The most that oneDNN's products may use, by its own variable."""
    return os.environ.get(VARIABLE, "all")
