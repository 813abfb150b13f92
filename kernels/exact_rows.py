"""How many rows the products of attention need before their bits stop depending on how many there are. BLAS libraries
choose their kernels by shape: below some number of rows a product sums in another order. The number differs between
libraries, processors and inner dimensions, so it is found by trying."""

import torch
from torch import Tensor

ROW_MULTIPLES = (4, 8, 16, 32)
"""Numbers of rows to try, cheapest first."""

_MOST_ROWS = 96
_BATCHES = (1, 3)  # libraries run a single product apart from batched ones


def exact_row_multiple(width: int, dim: int, device: torch.device) -> int:
    """The smallest multiple to which the rows of queries x keys and weights x values can be padded; the largest when
    none holds: whoever needs certainty compares results.
    # products [rows, dim] x [dim, width] and [rows, width] x [width, dim] in float32"""
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, max(_BATCHES), width, dim, generator=generator).to(device)
    queries = torch.randn(max(_BATCHES), _MOST_ROWS, dim, generator=generator).to(device)
    weights = torch.rand(max(_BATCHES), _MOST_ROWS, width, generator=generator).to(device)
    for multiple in ROW_MULTIPLES[:-1]:
        if _holds(multiple, queries, keys.transpose(1, 2)) and _holds(multiple, weights, values):
            return multiple
    return ROW_MULTIPLES[-1]


def _holds(multiple: int, left: Tensor, right: Tensor) -> bool:
    """Whether every number of rows gives a row the same bits, wherever it stands among the others."""
    # left [batch, most rows, inner], right [batch, inner, columns]
    whole = torch.bmm(left, right)
    for rows in range(multiple, _MOST_ROWS, multiple):
        for batch in _BATCHES:
            part = left[:batch, -rows:].contiguous()
            if not torch.equal(torch.bmm(part, right[:batch]), whole[:batch, -rows:]):
                return False
    return True
