"""The growth of a block in one native call: the same trees, states and entries as by the ops one by one."""

from typing import Any

import pytest
import torch
from torch import Tensor

from drafters.network.blocks import TrainedWeights
from drafters.network.checkpoint import weights_of
from drafters.network.drafter import SpecBlockDrafter
from drafters.network.served import ServingNetwork
from drafters.protocol import Committed, DraftContext, DraftingSizes, HostMetadata, Noise, ignore
from drafters.tree import DraftTree, VerifyResult
from kernels import ops
from kernels.cpu import library
from kernels.lattice import Lattice
from kernels.layers import Embedding
from kernels.sample import Filters
from tests.drafters.network.parts import tiny_drafter, tiny_table
from tests.tiny_models import VOCAB_SIZE

pytestmark = pytest.mark.skipif(library.variant() is None, reason="no kernels are compiled for this processor")
ROWS, LENGTH, NODES = 3, 24, 12


def watch(lattice: Lattice, logits: Tensor, ids: Tensor) -> None:
    """An observer: with one, a drafter runs op by op."""


def drafter(
    *, one_by_one: bool, in_8_bits: bool, dtype: torch.dtype, blocks: int = 1, **changes: Any
) -> SpecBlockDrafter:
    model = tiny_drafter(**changes).to(dtype)
    network = ServingNetwork(model.config, weights_of(model), in_8_bits=in_8_bits)
    embed = Embedding(tiny_table(model.config.hidden_size).to(dtype))
    sizes = DraftingSizes(
        max_sequences=ROWS,
        max_length=LENGTH,
        max_nodes=NODES,
        num_slots=ROWS * LENGTH + 1,
        observer=watch if one_by_one else ignore,
    )
    made = SpecBlockDrafter(sizes, TrainedWeights(network, embed, blocks=blocks))
    made.start([DraftContext(row, [1]) for row in range(ROWS)])
    return made


def filters_of(min_p: float, top_k: int, top_p: float, count: int) -> Filters:
    whole = torch.full((count,), top_p, dtype=torch.float64)
    return Filters(torch.full((count,), min_p).log(), torch.full((count,), top_k), whole)


def commit(made: SpecBlockDrafter, rows: list[int], roots: list[int], count: int) -> None:
    """Commit `count` positions from each root on, with features and tokens that depend on the position alone."""
    config = made._weights.network.config
    at = torch.tensor(roots)[:, None] + torch.arange(count)
    drawn = torch.Generator().manual_seed(7)
    features = torch.randn(ROWS, LENGTH, config.features_size, generator=drawn)
    tokens = torch.randint(VOCAB_SIZE, (ROWS, LENGTH + 1), generator=drawn)
    lines, result = torch.tensor(rows), VerifyResult(*[at[:, :0]] * 3)
    chosen = tokens[lines[:, None], at + 1], torch.full((len(rows),), count)
    read = features[lines[:, None], at], at[:, 0], 1 + lines[:, None] * LENGTH + at
    host = HostMetadata(tuple(rows), tuple(roots))
    made.commit(Committed(lines, *chosen, DraftTree.empty(len(rows)), result, *read, host=host))


@pytest.mark.parametrize(
    ("temperature", "filters"),
    [
        (0.0, None),
        (0.7, None),
        (1.0, (0.05, 0, 1.0)),
        (1.0, (0.0, 5, 1.0)),
        (0.7, (0.0, 0, 0.6)),
        (1.0, (0.01, 20, 0.9)),
    ],
)
@pytest.mark.parametrize(
    "changes",
    [{}, {"broadcast": False}, {"shift": False}, {"prefix_entries": "all"}, {"family": "qwen3"}, {"family": "olmo2"}],
    ids=str,
)
@pytest.mark.parametrize(
    ("in_8_bits", "dtype"), [(True, torch.float32), (False, torch.bfloat16), (False, torch.float32)]
)
def test_one_call_grows_what_the_ops_grow(
    changes: dict[str, Any],
    temperature: float,
    filters: tuple[float, int, float] | None,
    in_8_bits: bool,
    dtype: torch.dtype,
) -> None:
    """Sequences of different lengths, with one or several waiting entries, in several batches."""
    one, other = (drafter(one_by_one=way, in_8_bits=in_8_bits, dtype=dtype, **changes) for way in (False, True))
    assert one._grower._planned() is not None, "this network should grow in one call"
    assert other._grower._planned() is None
    for rows, roots, count in [([0], [0], 3), ([0], [3], 1), ([1, 2], [0, 0], 2), ([2, 0, 1], [2, 4, 2], 4)]:
        trees = []
        for made in (one, other):
            commit(made, rows, roots, count)
            ends = torch.tensor(roots) + count
            noise = Noise(
                torch.tensor(rows) + 5,
                torch.full((len(rows),), temperature),
                ends,
                warm=temperature > 0,
                host=HostMetadata(tuple(rows), tuple(ends.tolist())),
                filters=None if filters is None else filters_of(*filters, len(rows)),
            )
            trees.append(DraftTree(*(value.clone() for value in made.grow(torch.tensor(rows), noise))))
        near = 2e-2 if dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(trees[0].survival, trees[1].survival, atol=near, rtol=near)
        if dtype == torch.float32:
            for mine, theirs in zip(trees[0], trees[1], strict=True):
                if mine.dtype == torch.int64:
                    assert torch.equal(mine, theirs)
        pools = one._grower.pool, other._grower.pool
        assert torch.equal(pools[0].held, pools[1].held)
        torch.testing.assert_close(pools[0].storage, pools[1].storage, atol=near, rtol=near)


def test_trees_of_several_blocks_grow_op_by_op() -> None:
    made = drafter(one_by_one=False, in_8_bits=False, dtype=torch.float32, blocks=2)
    assert made._grower._planned() is None
    assert ops.REFERENCE.plan_growth(None, None, 1) is None  # type: ignore[arg-type]  # reads neither
