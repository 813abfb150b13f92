"""What past answers knew of committed tokens, against what a row reads token by token."""

import random

import pytest
import torch

from kernels.memory import CONTEXT, ORDERS, PAST, TEXT, WAYS, Memory, RowReader, past_lines, then
from kernels.ops import REFERENCE

ROWS, BUCKETS = 3, 64


def memory_with(texts: list[list[int]]) -> Memory:
    """Rows of which the first two share past answers, and the last one has none."""
    memory = Memory.empty(ROWS, (ROWS + 1) * BUCKETS, 1, 4)
    for row, text in enumerate(texts):
        past = [ROWS * BUCKETS, BUCKETS] if row < ROWS - 1 else [0, 0]
        memory.parts[row] = torch.tensor([[row * BUCKETS, BUCKETS], [0, 0], past])
        REFERENCE.add_text(memory, row, PAST, torch.tensor(text))
        REFERENCE.add_text(memory, row, TEXT, torch.tensor(text[: 3 + 4 * row]))
    return memory


@pytest.mark.parametrize("seed", range(3))
def test_lines_are_the_buckets_that_a_row_reads(seed: int) -> None:
    drawn = random.Random(seed)
    memory = memory_with([[drawn.randrange(9) for _ in range(60)] for _ in range(ROWS)])
    rows, tokens = torch.tensor([2, 0, 1]), torch.randint(9, (ROWS, 5), generator=torch.Generator().manual_seed(seed))
    tokens[1, 3:] = -1
    lines, num_read = past_lines(memory, rows, tokens), 0
    assert lines.shape == (ROWS, 5, len(ORDERS), WAYS)
    assert not lines[0].any(), "a row without a share reads that of another scope"
    for line, row in enumerate(rows.tolist()):
        reader = RowReader(memory, row)
        context = reader.tail()
        assert len(context) == CONTEXT
        for place, token in enumerate(tokens[line].tolist()):
            if token < 0:
                break
            for order, (bucket, _) in enumerate(reader.places(context, PAST)):
                assert torch.equal(lines[line, place, order], memory.entries[bucket])
                num_read += 1
            context = then(context, token)
    assert num_read > 20
