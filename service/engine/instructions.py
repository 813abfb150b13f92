"""Which instructions oneDNN's products may use on a CPU.

With AMX, how a row is summed depends on how many rows there are: verified text could differ from plain text in
near-ties. So it is left alone, unless an operator asks for it by oneDNN's own variable.
"""

import os

VARIABLE = "ONEDNN_MAX_CPU_ISA"
_ALL_BUT_TILES = "AVX512_CORE_FP16"


def prefer_rows_of_equal_bits() -> None:
    """Only before the process has asked oneDNN for anything. Changes nothing elsewhere than on x86."""
    os.environ.setdefault(VARIABLE, _ALL_BUT_TILES)


def chosen() -> str:
    """The most that products may use."""
    return os.environ.get(VARIABLE, "all")
