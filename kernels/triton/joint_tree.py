# ruff: noqa: N803 - sizes that a kernel is compiled for are written in capitals
# mypy: allow-untyped-decorators
"""Ops of `kernels/joint_tree.py` in one kernel each (learning in two). The host reads no value, so CUDA graphs can
capture them.

Many programs count a sequence's tokens: each owns some of the buckets and reads all tokens. One program grows a tree,
whose nodes it holds in registers. One program learns the committed tokens of all rows."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.memory import AFTER_REJECTED, CONTEXT, MAX_DEPTH, NO_TOKEN, ORDERS, PARTS, PAST, SIGHTING, TEXT, Memory
from kernels.trees import ROOT, DraftTree
from kernels.triton.memory import (
    AGES,
    BUCKET_LANES,
    EACH_ORDER,
    GROUPS,
    NUM_GROUPS,
    UNKNOWN,
    any_of,
    buckets_of,
    chance,
    context_of,
    count_sightings,
    expand,
    hash_contexts,
    offered,
    proposals_of,
    value_of,
    weigh,
)
from kernels.triton.trees import lanes

_PAIRS = 128  # pairs of a token and an order whose buckets a program looks up at once
_OWN = 8  # tokens per program
_PROGRAMS = 128  # most programs that count one sequence: about the number of a device's multiprocessors
_HELD = 1024  # elements of a tensor that one warp can hold in registers

_NUM_ORDERS, _CONTEXT, _NUM_PARTS, _MAX_DEPTH = map(tl.constexpr, (len(ORDERS), CONTEXT, len(PARTS), MAX_DEPTH))
_TEXT, _PAST, _NO_TOKEN, _ROOT = map(tl.constexpr, (TEXT, PAST, NO_TOKEN, ROOT))
_SIGHTING, _AFTER_REJECTED = map(tl.constexpr, (SIGHTING, AFTER_REJECTED))


def add_text(memory: Memory, row: int, part: int, tokens: Tensor) -> None:
    """Same as the reference op. # tokens [count]"""
    count = len(tokens)
    if count:
        tail = memory.tails[row].clone()  # a copy: other programs read the tail while the first one writes it
        programs = min(_PROGRAMS, triton.cdiv(count, _OWN))
        _add[(programs,)](memory, row, part, tail, tokens.contiguous(), count, PAIRS=_PAIRS, enable_fp_fusion=False)


def grow_joint_tree(memory: Memory, rows: Tensor, network: DraftTree | None, max_nodes: int, least: float) -> DraftTree:
    """Same as the reference op. # rows [batch]; network [batch, nodes]"""
    batch, nodes = len(rows), lanes(max_nodes)
    tokens, parents, depths = rows.new_empty(3, batch, max_nodes)
    tree = DraftTree(tokens, parents, depths, memory.weights.new_empty(batch, max_nodes), rows.new_empty(batch))
    given = None if network is None else DraftTree(*(part.contiguous() for part in network))
    width = 0 if network is None else network.width
    held = max(BUCKET_LANES.value**2, AGES.value * nodes)
    if batch:
        _grow[(batch,)](
            memory, rows.contiguous(), given, tree, memory.network.width, width, max_nodes, least,
            NODES=nodes, PROPOSED=lanes(width), num_warps=triton.cdiv(held, _HELD), enable_fp_fusion=False,
        )  # fmt: skip
    return tree


def learn_committed(
    memory: Memory, rows: Tensor, tokens: Tensor, counts: Tensor, verified: DraftTree, choices: Tensor, rate: float
) -> Tensor:
    """Same as the reference op. Rows of one scope share weights and past answers, so one program handles all rows in
    order, which makes the result deterministic. Afterwards many programs count the target's choices after rejected
    nodes, which concern one row each. # -> [4 + len(ORDERS)]"""
    outcome, tails, rows = rows.new_empty(4 + len(ORDERS)), memory.tails[rows], rows.contiguous()
    _learn[(1,)](
        memory, rows, tokens.contiguous(), counts.contiguous(), outcome, memory.network.width,
        tokens.shape[1], len(rows), rate,
        NODES=lanes(memory.network.width), num_warps=triton.cdiv(BUCKET_LANES.value**2, _HELD), enable_fp_fusion=False,
    )  # fmt: skip
    if len(rows) and verified.width:
        programs, tree = triton.cdiv(verified.width, _OWN), DraftTree(*(part.contiguous() for part in verified))
        _add_rejected[len(rows), programs](
            memory, rows, tails, tree, choices.contiguous(), tree.width,
            MOST=MAX_DEPTH, PAIRS=_PAIRS, enable_fp_fusion=False,
        )  # fmt: skip
    return outcome


@triton.jit(do_not_specialize=["row", "part", "count"])
def _add(
    memory: tl.tuple,
    row: tl.tensor,
    part: tl.tensor,
    tail: tl.tensor,
    tokens: tl.tensor,
    count: tl.tensor,
    PAIRS: tl.constexpr,
) -> None:
    """Count the tokens that fall into this program's buckets, in the order of the tokens."""
    mine, programs, row = tl.program_id(0), tl.num_programs(0), tl.cast(row, tl.int64)
    pair, age = tl.arange(0, PAIRS), tl.arange(0, AGES)
    start = 0
    while start < count * _NUM_ORDERS:
        place, order = (start + pair) // _NUM_ORDERS, (start + pair) % _NUM_ORDERS
        token = tl.load(tokens + place, mask=place < count, other=0)
        context = context_of(tail, tokens, place[:, None], age[None, :], (place < count)[:, None])
        bucket, tag = buckets_of(memory, row, part, hash_contexts(memory, context, age[None, :], order))
        count_sightings(
            memory, bucket, tag, token, (bucket >= 0) & (place < count) & (bucket % programs == mine), _SIGHTING
        )
        start += PAIRS
    if (mine == 0) & (part == _TEXT):
        newest = context_of(tail, tokens, count, age, age < _CONTEXT)
        tl.store(memory.tails + row * _CONTEXT + age, newest, mask=age < _CONTEXT)


@triton.jit(do_not_specialize=["nodes"])
def _add_rejected(
    memory: tl.tuple,
    rows: tl.tensor,
    tails: tl.tensor,
    tree: tl.tuple,
    choices: tl.tensor,
    nodes: tl.tensor,
    MOST: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    """Count the target's choices after a row's rejected nodes, as `_add` does.
    # tails [batch, CONTEXT], last tokens before the step"""
    line, mine, programs = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row, count, tail = tl.load(rows + line), tl.load(tree.num_nodes + line), tails + line * _CONTEXT
    pair, age = tl.arange(0, PAIRS), tl.arange(0, AGES)[None, :]
    tokens, parents, choices = tree.tokens + line * nodes, tree.parents + line * nodes, choices + line * (nodes + 1) + 1
    start = 0
    while start < count * _NUM_ORDERS:
        node, order = (start + pair) // _NUM_ORDERS, (start + pair) % _NUM_ORDERS
        exists = node < count
        context, above, level = tl.full([PAIRS, AGES], _NO_TOKEN, tl.int64), tl.where(exists, node, _ROOT), 0
        ends, accepted = tl.zeros([PAIRS], tl.int32), exists
        while (tl.max(above, 0) >= 0) & (level < MOST):
            active = above >= 0
            token = tl.load(tokens + above, mask=active, other=_NO_TOKEN)
            context = tl.where((age == level) & active[:, None], token[:, None], context)
            above = tl.load(parents + above, mask=active, other=_ROOT).to(tl.int32)
            accepted = accepted & (~active | (tl.load(choices + above, mask=active, other=_NO_TOKEN) == token))
            ends += active.to(tl.int32)
            level += 1
        before = age - ends[:, None]
        is_before = (before >= 0) & (before < _CONTEXT)
        context = tl.where(is_before, tl.load(tail + before, mask=is_before, other=_NO_TOKEN), context)
        bucket, tag = buckets_of(memory, row, _TEXT, hash_contexts(memory, context, age, order))
        chosen = tl.load(choices + node, mask=exists, other=0)
        is_mine = (bucket >= 0) & exists & ~accepted & (bucket % programs == mine)
        count_sightings(memory, bucket, tag, chosen, is_mine, _AFTER_REJECTED)
        start += PAIRS


@triton.jit(do_not_specialize=["held", "width", "most"])
def _grow(
    memory: tl.tuple,
    rows: tl.tensor,
    given: tl.tuple,
    tree: tl.tuple,
    held: tl.tensor,
    width: tl.tensor,
    most: tl.tensor,
    least: tl.tensor,
    NODES: tl.constexpr,
    PROPOSED: tl.constexpr,
) -> None:
    """Grow one row's tree. Nodes are expanded by falling survival, which is also the order of the result: a node is
    numbered and written when it is expanded. It cannot be replaced later, because later nodes have lower survival."""
    line, slot = tl.program_id(0).to(tl.int64), tl.arange(0, NODES)
    row, age = tl.load(rows + line), tl.arange(0, AGES)
    if given is None:
        network = proposals_of(memory.network, 0, 0)
        tl.store(memory.network.num_nodes + row, 0)
    else:
        count = tl.minimum(tl.load(given.num_nodes + line), held)
        network = proposals_of(given, line * width, count)
        _keep(given, line * width, memory.network, row, held, count, PROPOSED)
    survival = tl.where(slot < most, -1.0, float("inf"))  # empty slots are the first to be taken
    waits, tokens, parents = slot < 0, tl.zeros([NODES], tl.int32), tl.zeros([NODES], tl.int32)
    depths, proposals = tl.zeros([NODES], tl.int32), tl.zeros([NODES], tl.int32)
    contexts = tl.zeros([AGES, NODES], tl.int32)  # contexts by number
    tail = tl.load(memory.tails + row * _CONTEXT + age, mask=age < _CONTEXT, other=_NO_TOKEN).to(tl.int32)
    context, proposed, number, depth, above, goes_on = tail, _ROOT, -1, 0, 1.0, True
    while goes_on:
        if depth < _MAX_DEPTH:
            after, rounds = expand(memory, row, network, proposed, depth + 1, context, age)
            for now in range(rounds):
                token, place, exists = offered(memory, after, now)
                if any_of(exists):
                    node, _, score, is_new, _, _ = weigh(memory, after, now, token, place)
                    likely = above * chance(score)
                    is_likely = exists & is_new & (likely >= least)
                    nodes = (survival, tokens, proposals, parents, depths, waits)
                    survival, tokens, proposals, parents, depths, waits = _insert(
                        nodes, is_likely, likely, token, node, number, depth + 1, NODES
                    )
        above = tl.max(tl.where(waits, survival, -1.0), 0)
        goes_on = above >= 0
        if goes_on:
            chosen = slot == tl.min(tl.where(waits & (survival == above), slot, NODES), 0)
            waits, number = waits & ~chosen, number + 1
            token, parent = value_of(chosen, tokens), value_of(chosen, parents)
            depth, proposed = value_of(chosen, depths), value_of(chosen, proposals)
            before = tl.sum(tl.where((slot == parent)[None, :], contexts, 0), 1)
            before = tl.gather(tl.where(parent >= 0, before, tail), tl.maximum(age - 1, 0), 0)
            context = tl.where(age == 0, token, before)
            contexts = tl.where((slot == number)[None, :], context[:, None], contexts)
            _write(tree, line * most + number, token, parent, depth, above, True)
            if given is None:
                _write(memory.alone, row * held + number, token, parent, depth, above, True)
    _write(tree, line * most + slot, 0, _ROOT, 0, 0.0, (slot > number) & (slot < most))
    tl.store(tree.num_nodes + line, number + 1)
    if given is None:
        tl.store(memory.alone.num_nodes + row, number + 1)


@triton.jit
def _insert(
    nodes: tl.tuple,
    active: tl.tensor,
    likely: tl.tensor,
    token: tl.tensor,
    node: tl.tensor,
    parent: tl.tensor,
    depth: tl.tensor,
    NODES: tl.constexpr,
) -> tl.tuple:
    """Insert candidates one after the other: each replaces the least likely node if it is likelier.
    # nodes: six of [NODES]; active, likely, token, node [BUCKET_LANES]"""
    survival, tokens, proposals, parents, depths, waits = nodes
    slot, lane, least = tl.arange(0, NODES), tl.arange(0, BUCKET_LANES), tl.min(survival, 0)
    active = active & (likely > least)
    while any_of(active):
        one = lane == tl.min(tl.where(active, lane, BUCKET_LANES), 0)
        taken = slot == tl.min(tl.where(survival == least, slot, NODES), 0)
        survival = tl.where(taken, value_of(one, likely), survival)
        tokens = tl.where(taken, value_of(one, token), tokens)
        proposals = tl.where(taken, value_of(one, tl.where(node >= 0, node, UNKNOWN)), proposals)
        parents, depths = tl.where(taken, parent, parents), tl.where(taken, depth, depths)
        waits = waits | taken
        least = tl.min(survival, 0)
        active = active & ~one & (likely > least)
    return survival, tokens, proposals, parents, depths, waits


@triton.jit(do_not_specialize=["held", "longest", "batch"])
def _learn(
    memory: tl.tuple,
    rows: tl.tensor,
    committed: tl.tensor,
    counts: tl.tensor,
    outcome: tl.tensor,
    held: tl.tensor,
    longest: tl.tensor,
    batch: tl.tensor,
    rate: tl.tensor,
    NODES: tl.constexpr,
) -> None:
    age, lane, orders = tl.arange(0, AGES), tl.arange(0, BUCKET_LANES), tl.arange(0, EACH_ORDER)
    matched, accepted, total = tl.cast(0, tl.int64), tl.cast(0, tl.int64), tl.cast(0, tl.int64)
    remembered, known = tl.cast(0, tl.int64), tl.zeros([EACH_ORDER], tl.int64)
    for line in range(batch):
        row, count, text = tl.load(rows + line), tl.load(counts + line), committed + line * longest
        stores, tail, predicted = tl.load(memory.stores + row) != 0, memory.tails + row * _CONTEXT, tl.cast(0, tl.int64)
        matched += _matching(memory.alone, row, held, text, count - 1, NODES)
        accepted, total = accepted + tl.maximum(count - 1, 0), total + count
        has_past = tl.load(memory.parts + (row * _NUM_PARTS + _PAST) * 2 + 1) > 0
        remembered += tl.where(stores & has_past, count, 0)
        network = proposals_of(memory.network, row * held, tl.load(memory.network.num_nodes + row))
        proposed = tl.where(network[4] > 0, _ROOT, UNKNOWN)
        for place in range(count):
            committed_token = tl.load(text + place)
            context = context_of(tail, text, place, age, age < _CONTEXT)
            after, rounds = expand(memory, row, network, proposed, place + 1, context.to(tl.int32), age)
            following = tl.cast(UNKNOWN, tl.int32)
            for now in range(rounds):
                token, stands, exists = offered(memory, after, now)
                if any_of(exists):
                    node, features, _, is_new, in_prediction, in_past = weigh(memory, after, now, token, stands)
                    labelled = exists & is_new
                    is_true = labelled & (token == committed_token)
                    following = tl.maximum(following, tl.max(tl.where(is_true & (node >= 0), node, UNKNOWN), 0))
                    predicted += (tl.max(tl.where(is_true, in_prediction, -1), 0) > 0).to(tl.int64)
                    known += (orders == tl.max(tl.where(is_true, in_past, -1), 0)).to(tl.int64)
                    while stores & any_of(labelled):
                        one = lane == tl.min(tl.where(labelled, lane, BUCKET_LANES), 0)
                        feature = tl.sum(tl.where(one[None, :], features, 0), 1)
                        label = value_of(one, is_true.to(tl.int32)).to(tl.float32)
                        _update(memory, after[4] + feature, label, rate)
                        labelled = labelled & ~one
            proposed = following
            _count_committed(memory, row, _TEXT, context, age, committed_token)
            if stores:
                _count_committed(memory, row, _PAST, context, age, committed_token)
        newest = context_of(tail, text, count, age, age < _CONTEXT)
        tl.debug_barrier()  # all threads have read the tail
        tl.store(tail + age, newest, mask=age < _CONTEXT)
        tl.store(memory.predicted + row, tl.load(memory.predicted + row) + predicted)
        tl.store(memory.alone.num_nodes + row, 0)
        tl.store(memory.network.num_nodes + row, 0)
    tl.store(outcome, matched)
    tl.store(outcome + 1, accepted)
    tl.store(outcome + 2, total)
    tl.store(outcome + 3, remembered)
    tl.store(outcome + 4 + orders, known, mask=orders < _NUM_ORDERS)


@triton.jit
def _update(memory: tl.tuple, feature: tl.tensor, label: tl.tensor, rate: tl.tensor) -> None:
    """Update the weights by one candidate's outcome, before the next candidate is scored. # feature [GROUPS]"""
    is_one = tl.arange(0, GROUPS) < NUM_GROUPS
    weight = tl.load(memory.weights + feature, mask=is_one, other=0.0)
    square = tl.load(memory.squares + feature, mask=is_one, other=1.0)
    error = label - chance(tl.sum(weight, 0))
    square += error * error
    weight += tl.div_rn(rate * error, tl.sqrt_rn(square))
    tl.debug_barrier()
    tl.store(memory.squares + feature, square, mask=is_one)
    tl.store(memory.weights + feature, weight, mask=is_one)
    tl.debug_barrier()


@triton.jit
def _count_committed(
    memory: tl.tuple,
    row: tl.tensor,
    part: tl.constexpr,
    context: tl.tensor,
    age: tl.tensor,
    token: tl.tensor,
) -> None:
    """Count the token after the context of each order."""
    seen = hash_contexts(memory, context[None, :], age[None, :], tl.arange(0, EACH_ORDER))
    bucket, tag = buckets_of(memory, row, part, seen)
    count_sightings(memory, bucket, tag, token, bucket >= 0, _SIGHTING)


@triton.jit
def _keep(
    given: tl.tuple,
    first: tl.tensor,
    kept: tl.tuple,
    row: tl.tensor,
    held: tl.tensor,
    count: tl.tensor,
    PROPOSED: tl.constexpr,
) -> None:
    """Store the network's proposals in the memory, for `learn_committed`."""
    node = tl.arange(0, PROPOSED)
    at, exists = first + node, node < count
    token, parent = tl.load(given.tokens + at, mask=exists), tl.load(given.parents + at, mask=exists)
    depth, survival = tl.load(given.depths + at, mask=exists), tl.load(given.survival + at, mask=exists)
    _write(kept, row * held + node, token, parent, depth, survival, exists)
    tl.store(kept.num_nodes + row, count)


@triton.jit
def _write(
    tree: tl.tuple,
    place: tl.tensor,
    token: tl.tensor,
    parent: tl.tensor,
    depth: tl.tensor,
    survival: tl.tensor,
    active: tl.tensor,
) -> None:
    tl.store(tree.tokens + place, token, mask=active)
    tl.store(tree.parents + place, parent, mask=active)
    tl.store(tree.depths + place, depth, mask=active)
    tl.store(tree.survival + place, survival, mask=active)


@triton.jit
def _matching(
    tree: tl.tuple, row: tl.tensor, held: tl.tensor, text: tl.tensor, count: tl.tensor, NODES: tl.constexpr
) -> tl.tensor:
    """Count the leading tokens that form a path from the tree's root."""
    node = tl.arange(0, NODES)
    exists = node < tl.load(tree.num_nodes + row)
    token = tl.load(tree.tokens + row * held + node, mask=exists, other=_NO_TOKEN)
    parent = tl.load(tree.parents + row * held + node, mask=exists, other=UNKNOWN)
    here, right, goes_on = _ROOT, tl.cast(0, tl.int64), count > 0
    while goes_on:
        committed_token = tl.load(text + right)
        child = tl.min(tl.where(exists & (parent == here) & (token == committed_token), node, NODES), 0)
        right += child < NODES
        goes_on = (child < NODES) & (right < count)
        here = child
    return right
