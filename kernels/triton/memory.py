# ruff: noqa: N803 - sizes that a kernel is compiled for are written in capitals
# mypy: allow-untyped-decorators
"""Ops of `kernels/memory.py` in one kernel each, learning in two. Nothing is read on the host: they can be captured.

A text is counted by many programs: each has some of the buckets and goes over all tokens. A tree is grown by one
program, which holds its nodes in registers. What was committed is learnt by one program for all rows.

Legend: lanes = the places of one bucket of each order, the longest first; round = candidates that are weighed at once:
those of a part, or of as many nodes of the network's tree. So candidates come in the reference's order."""

import triton
import triton.language as tl
from torch import Tensor

from kernels import memory as reference
from kernels.memory import CONTEXT, FEATURES, KINDS, NO_TOKEN, ORDERS, PARTS, PAST, PREDICTION, TEXT, WAYS, Memory
from kernels.tree_attention import MAX_DEPTH
from kernels.trees import ROOT, DraftTree
from kernels.triton.sample import hash_bits
from kernels.triton.trees import lanes

_PAIRS = 128  # of a token and an order, whose buckets a program looks up at once
_OWN = 8  # tokens for which one more program counts
_PROGRAMS = 128  # that count a text at most: about as many as a device has processors
_HELD = 1024  # numbers of a tensor for which a warp has registers

_AGES = tl.constexpr(triton.next_power_of_2(CONTEXT))
_LANES = tl.constexpr(triton.next_power_of_2(len(ORDERS) * WAYS))
_EACH_ORDER = tl.constexpr(triton.next_power_of_2(len(ORDERS)))
_NUM_GROUPS = tl.constexpr(3 * len(PARTS) + 2)  # of features: three of each part, a joint one, and noise
_GROUPS = tl.constexpr(triton.next_power_of_2(3 * len(PARTS) + 2))

_ORDERS, _NUM_ORDERS, _CONTEXT, _WAYS = map(tl.constexpr, (ORDERS, len(ORDERS), CONTEXT, WAYS))
_NUM_PARTS, _TEXT, _PREDICTION, _PAST = map(tl.constexpr, (len(PARTS), TEXT, PREDICTION, PAST))
_KINDS, _FEATURES, _NO_TOKEN = map(tl.constexpr, (KINDS, FEATURES, NO_TOKEN))
_ROOT, _UNKNOWN = tl.constexpr(ROOT), tl.constexpr(ROOT - 1)  # the latter: not a node of the network's
_BUCKET_SHIFT, _TAG_SHIFT = tl.constexpr(reference._BUCKET_SHIFT), tl.constexpr(reference._TAG_SHIFT)
_TAG_PLACE, _TAGS = tl.constexpr(64 - reference._TAG_BITS), tl.constexpr((1 << reference._TAG_BITS) - 1)
_COUNT_BITS, _TOKENS = tl.constexpr(reference._COUNT_BITS), tl.constexpr((1 << reference._TOKEN_BITS) - 1)
_MOST, _SIGHTING = tl.constexpr(reference._MOST), tl.constexpr(reference._SIGHTING)
_AFTER_REJECTED, _NOISES = tl.constexpr(reference._AFTER_REJECTED), tl.constexpr(reference._NOISES)
_SHARE_EDGES, _SHARES = tl.constexpr(reference._SHARE_EDGES), tl.constexpr(reference._SHARES)
_TOTAL_EDGES, _TOTALS = tl.constexpr(reference._TOTAL_EDGES), tl.constexpr(reference._TOTALS)
_STRENGTH_EDGES, _STRENGTHS = tl.constexpr(reference._STRENGTH_EDGES), tl.constexpr(reference._STRENGTHS)
_CLAIMS, _LEAST_ODDS = tl.constexpr(reference._CLAIMS), tl.constexpr(reference._LEAST_ODDS)
_LENGTHS, _OF_SHARE, _OF_KNOWN = map(tl.constexpr, (reference._LENGTHS, reference._OF_SHARE, reference._OF_KNOWN))
_OF_PART, _OF_CLAIM, _MAX_DEPTH = map(tl.constexpr, (reference._OF_PART, reference._OF_CLAIM, reference._MAX_DEPTH))
_LOWEST, _HIGHEST = map(tl.constexpr, reference._LIMITS)


def add_text(memory: Memory, row: int, part: int, tokens: Tensor) -> None:
    """As the reference."""
    count = len(tokens)
    if count:
        tail = memory.tails[row].clone()  # that other programs read while the first one writes
        programs = min(_PROGRAMS, triton.cdiv(count, _OWN))
        _add[(programs,)](memory, row, part, tail, tokens.contiguous(), count, PAIRS=_PAIRS, enable_fp_fusion=False)


def grow_joint_tree(memory: Memory, rows: Tensor, network: DraftTree | None, max_nodes: int, least: float) -> DraftTree:
    """As the reference."""
    batch, nodes = len(rows), lanes(max_nodes)
    tokens, parents, depths = rows.new_empty(3, batch, max_nodes)
    tree = DraftTree(tokens, parents, depths, memory.weights.new_empty(batch, max_nodes), rows.new_empty(batch))
    given = None if network is None else DraftTree(*(part.contiguous() for part in network))
    width = 0 if network is None else network.width
    held = max(_LANES.value**2, _AGES.value * nodes)
    if batch:
        _grow[(batch,)](
            memory, rows.contiguous(), given, tree, memory.network.width, width, max_nodes, least,
            NODES=nodes, PROPOSED=lanes(width), num_warps=triton.cdiv(held, _HELD), enable_fp_fusion=False,
        )  # fmt: skip
    return tree


def learn_committed(
    memory: Memory, rows: Tensor, tokens: Tensor, counts: Tensor, verified: DraftTree, choices: Tensor, rate: float
) -> Tensor:
    """As the reference. Rows of one scope write the same weights and past answers, and what a row writes the next one
    reads: so one program goes over the rows in their order, and the result is the same each time. What the target chose
    after rejected nodes is a row's own, and is counted by many programs after that."""
    outcome, tails, rows = rows.new_empty(4 + len(ORDERS)), memory.tails[rows], rows.contiguous()
    _learn[(1,)](
        memory, rows, tokens.contiguous(), counts.contiguous(), outcome, memory.network.width,
        tokens.shape[1], len(rows), rate,
        NODES=lanes(memory.network.width), num_warps=triton.cdiv(_LANES.value**2, _HELD), enable_fp_fusion=False,
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
    """All sightings of some buckets, in the order of the text."""
    mine, programs, row = tl.program_id(0), tl.num_programs(0), tl.cast(row, tl.int64)
    pair, age = tl.arange(0, PAIRS), tl.arange(0, _AGES)
    start = 0
    while start < count * _NUM_ORDERS:
        place, order = (start + pair) // _NUM_ORDERS, (start + pair) % _NUM_ORDERS
        token = tl.load(tokens + place, mask=place < count, other=0)
        context = _context(tail, tokens, place[:, None], age[None, :], (place < count)[:, None])
        bucket, tag = _places(memory, row, part, _hashes(memory, context, age[None, :], order))
        _count(memory, bucket, tag, token, (bucket >= 0) & (place < count) & (bucket % programs == mine), _SIGHTING)
        start += PAIRS
    if (mine == 0) & (part == _TEXT):
        newest = _context(tail, tokens, count, age, age < _CONTEXT)
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
    """What the target chose after a row's rejected nodes, counted as by `_add`. # tails [batch, CONTEXT], old ones"""
    line, mine, programs = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row, count, tail = tl.load(rows + line), tl.load(tree.num_nodes + line), tails + line * _CONTEXT
    pair, age = tl.arange(0, PAIRS), tl.arange(0, _AGES)[None, :]
    tokens, parents, choices = tree.tokens + line * nodes, tree.parents + line * nodes, choices + line * (nodes + 1) + 1
    start = 0
    while start < count * _NUM_ORDERS:
        node, order = (start + pair) // _NUM_ORDERS, (start + pair) % _NUM_ORDERS
        exists = node < count
        context, above, level = tl.full([PAIRS, _AGES], _NO_TOKEN, tl.int64), tl.where(exists, node, _ROOT), 0
        ends, accepted = tl.zeros([PAIRS], tl.int32), exists
        while (tl.max(above, 0) >= 0) & (level < MOST):
            asked = above >= 0
            token = tl.load(tokens + above, mask=asked, other=_NO_TOKEN)
            context = tl.where((age == level) & asked[:, None], token[:, None], context)
            above = tl.load(parents + above, mask=asked, other=_ROOT).to(tl.int32)
            accepted = accepted & (~asked | (tl.load(choices + above, mask=asked, other=_NO_TOKEN) == token))
            ends += asked.to(tl.int32)
            level += 1
        before = age - ends[:, None]
        is_before = (before >= 0) & (before < _CONTEXT)
        context = tl.where(is_before, tl.load(tail + before, mask=is_before, other=_NO_TOKEN), context)
        bucket, tag = _places(memory, row, _TEXT, _hashes(memory, context, age, order))
        chosen = tl.load(choices + node, mask=exists, other=0)
        is_mine = (bucket >= 0) & exists & ~accepted & (bucket % programs == mine)
        _count(memory, bucket, tag, chosen, is_mine, _AFTER_REJECTED)
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
    """One row's tree. Nodes are expanded by falling survival, as they stand in the result: a node gets its number, and
    is written, when it is expanded. None is replaced after that, for those that come later survive less."""
    line, slot = tl.program_id(0).to(tl.int64), tl.arange(0, NODES)
    row, age, lane = tl.load(rows + line), tl.arange(0, _AGES), tl.arange(0, _LANES)
    if given is None:
        network = _proposals(memory.network, 0, 0)
        tl.store(memory.network.num_nodes + row, 0)
    else:
        count = tl.minimum(tl.load(given.num_nodes + line), held)
        network = _proposals(given, line * width, count)
        _keep(given, line * width, memory.network, row, held, count, PROPOSED)
    survival = tl.where(slot < most, -1.0, float("inf"))  # empty slots are the first to be taken
    waits, tokens, parents = slot < 0, tl.zeros([NODES], tl.int32), tl.zeros([NODES], tl.int32)
    depths, proposals = tl.zeros([NODES], tl.int32), tl.zeros([NODES], tl.int32)
    contexts = tl.zeros([_AGES, NODES], tl.int32)  # by number
    tail = tl.load(memory.tails + row * _CONTEXT + age, mask=age < _CONTEXT, other=_NO_TOKEN).to(tl.int32)
    context, proposed, number, depth, above, goes_on = tail, _ROOT, -1, 0, 1.0, True
    while goes_on:
        if depth < _MAX_DEPTH:
            seen, of, kind, rounds = _expanded(memory, row, network, proposed, depth + 1, context, age)
            for now in range(rounds):
                token, place, exists = _offered(memory, row, network, of, seen, now)
                if _any(exists):
                    node, _, score, is_new, _, _ = _weighed(memory, row, network, of, seen, kind, now, token, place)
                    likely = above * _chance(score)
                    fewest = tl.min(survival, 0)
                    held_now = exists & is_new & (likely >= least) & (likely > fewest)
                    while _any(held_now):
                        one = lane == tl.min(tl.where(held_now, lane, _LANES), 0)
                        taken = slot == tl.min(tl.where(survival == fewest, slot, NODES), 0)
                        survival = tl.where(taken, _of(one, likely), survival)
                        tokens = tl.where(taken, _of(one, token), tokens)
                        proposals = tl.where(taken, _of(one, tl.where(node >= 0, node, _UNKNOWN)), proposals)
                        parents, depths = tl.where(taken, number, parents), tl.where(taken, depth + 1, depths)
                        waits = waits | taken
                        fewest = tl.min(survival, 0)
                        held_now = held_now & ~one & (likely > fewest)
        above = tl.max(tl.where(waits, survival, -1.0), 0)
        goes_on = above >= 0
        if goes_on:
            chosen = slot == tl.min(tl.where(waits & (survival == above), slot, NODES), 0)
            waits, number = waits & ~chosen, number + 1
            token, parent, depth, proposed = (
                _of(chosen, tokens), _of(chosen, parents), _of(chosen, depths), _of(chosen, proposals),
            )  # fmt: skip
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
    age, lane, orders = tl.arange(0, _AGES), tl.arange(0, _LANES), tl.arange(0, _EACH_ORDER)
    right, accepted, total = tl.cast(0, tl.int64), tl.cast(0, tl.int64), tl.cast(0, tl.int64)
    remembered, known = tl.cast(0, tl.int64), tl.zeros([_EACH_ORDER], tl.int64)
    for line in range(batch):
        row, count, text = tl.load(rows + line), tl.load(counts + line), committed + line * longest
        stores, tail, predicted = tl.load(memory.stores + row) != 0, memory.tails + row * _CONTEXT, tl.cast(0, tl.int64)
        right += _right(memory.alone, row, held, text, count - 1, NODES)
        accepted, total = accepted + tl.maximum(count - 1, 0), total + count
        has_past = tl.load(memory.parts + (row * _NUM_PARTS + _PAST) * 2 + 1) > 0
        remembered += tl.where(stores & has_past, count, 0)
        network = _proposals(memory.network, row * held, tl.load(memory.network.num_nodes + row))
        proposed = tl.where(network[4] > 0, _ROOT, _UNKNOWN)
        for place in range(count):
            said = tl.load(text + place)
            context = _context(tail, text, place, age, age < _CONTEXT)
            seen, of, kind, rounds = _expanded(memory, row, network, proposed, place + 1, context.to(tl.int32), age)
            following = tl.cast(_UNKNOWN, tl.int32)
            for now in range(rounds):
                token, stands, exists = _offered(memory, row, network, of, seen, now)
                if _any(exists):
                    node, features, _, is_new, in_prediction, in_past = _weighed(
                        memory, row, network, of, seen, kind, now, token, stands
                    )
                    labelled = exists & is_new
                    is_true = labelled & (token == said)
                    following = tl.maximum(following, tl.max(tl.where(is_true & (node >= 0), node, _UNKNOWN), 0))
                    predicted += (tl.max(tl.where(is_true, in_prediction, -1), 0) > 0).to(tl.int64)
                    known += (orders == tl.max(tl.where(is_true, in_past, -1), 0)).to(tl.int64)
                    while stores & _any(labelled):
                        one = lane == tl.min(tl.where(labelled, lane, _LANES), 0)
                        feature = tl.sum(tl.where(one[None, :], features, 0), 1)
                        _update(memory, kind + feature, _of(one, is_true.to(tl.int32)).to(tl.float32), rate)
                        labelled = labelled & ~one
            proposed = following
            _count_said(memory, row, _TEXT, context, age, said)
            if stores:
                _count_said(memory, row, _PAST, context, age, said)
        newest = _context(tail, text, count, age, age < _CONTEXT)
        tl.debug_barrier()  # all have read the tail
        tl.store(tail + age, newest, mask=age < _CONTEXT)
        tl.store(memory.predicted + row, tl.load(memory.predicted + row) + predicted)
        tl.store(memory.alone.num_nodes + row, 0)
        tl.store(memory.network.num_nodes + row, 0)
    tl.store(outcome, right)
    tl.store(outcome + 1, accepted)
    tl.store(outcome + 2, total)
    tl.store(outcome + 3, remembered)
    tl.store(outcome + 4 + orders, known, mask=orders < _NUM_ORDERS)


@triton.jit
def _expanded(
    memory: tl.tuple,
    row: tl.tensor,
    network: tl.tuple,
    proposed: tl.tensor,
    depth: tl.tensor,
    context: tl.tensor,
    age: tl.tensor,
) -> tl.tuple:
    """What is common to all candidates after a node: what names the places of its context; of the network's tree the
    node, the depth, whether the node has children there, and whether that tree claims any in their place; where the
    weights of that kind begin; and in how many rounds all candidates come."""
    order, _ = _lanes()
    seen = _hashes(memory, context.to(tl.int64)[None, :], age[None, :], order)
    knows, is_claimed, start = tl.cast(0, tl.int32), tl.cast(0, tl.int32), 0
    while start < network[4]:
        _, is_child, is_at_depth = _nodes(network, proposed, depth, start)
        knows = tl.maximum(knows, tl.max(is_child.to(tl.int32), 0))
        is_claimed = tl.maximum(is_claimed, tl.max((is_child | is_at_depth).to(tl.int32), 0))
        start += _LANES
    kind = (tl.load(memory.scopes + row) * _KINDS + 2 * tl.load(memory.warm + row).to(tl.int64) + knows) * _FEATURES
    rounds = tl.where(is_claimed > 0, tl.cdiv(network[4], _LANES), 0) + _NUM_PARTS
    return seen, (proposed, depth, knows, is_claimed), kind, rounds


@triton.jit
def _offered(
    memory: tl.tuple, row: tl.tensor, network: tl.tuple, of: tl.tuple, seen: tl.tuple, now: tl.tensor
) -> tl.tuple:
    """The candidates of a round: tokens, where they stand (a part's order, or a node of the network's), and whether
    there is one. # each [LANES]"""
    place, _ = _lanes()
    if now < _NUM_PARTS:
        token, count = _seen(memory, row, now, seen)
        exists = count > 0
    else:
        place, token, exists = _claims(network, of, (now - _NUM_PARTS) * _LANES)
    return token, place, exists


@triton.jit
def _weighed(
    memory: tl.tuple,
    row: tl.tensor,
    network: tl.tuple,
    of: tl.tuple,
    seen: tl.tuple,
    kind: tl.tensor,
    now: tl.tensor,
    token: tl.tensor,
    place: tl.tensor,
) -> tl.tuple:
    """Of each candidate its node of the network's or -1, its features, the sum of their weights in the order of groups,
    whether it is new (in no part before, nor behind a longer context, nor claimed by a node before), and the longest
    orders in which the prediction and past answers have it, or -1.
    # token, place [LANES] -> features [GROUPS, LANES], the others like token"""
    order, _ = _lanes()
    weights = memory.weights + kind
    first, first_order = tl.full([_LANES], _NUM_PARTS, tl.int32), tl.full([_LANES], -1, tl.int32)
    own, past, predicted, past_order = tl.zeros_like(first), tl.zeros_like(first), first_order, first_order
    features, score = tl.zeros([_GROUPS, _LANES], tl.int32), tl.zeros([_LANES], tl.float32)
    for part in tl.static_range(_NUM_PARTS):
        others, counts = _seen(memory, row, part, seen)
        known = tl.max(tl.where(counts > 0, order, -1), 0)
        is_there = (token[:, None] == others[None, :]) & (counts > 0)[None, :]
        longest = tl.max(tl.where(is_there, order[None, :], -1), 1)
        of_longest = order[None, :] == longest[:, None]
        count = tl.sum(tl.where(is_there & of_longest, counts[None, :], 0), 1).to(tl.float32) / _SIGHTING
        total = tl.sum(tl.where(of_longest, counts[None, :], 0), 1).to(tl.float32) / _SIGHTING
        is_new, share = longest < 0, tl.div_rn(count, tl.maximum(total, 1 / _SIGHTING))
        shared = tl.where(is_new, _OF_SHARE - 1, longest * _SHARES + _passed(share, _SHARE_EDGES, _SHARES - 1))
        lengths = (known + 1) * _LENGTHS + longest + 1 + _OF_SHARE
        amount = tl.where(is_new, _TOTALS, _passed(total, _TOTAL_EDGES, _TOTALS - 1)) + (_OF_SHARE + _OF_KNOWN)
        features, score = _with(features, score, weights, 3 * part, shared + part * _OF_PART)
        features, score = _with(features, score, weights, 3 * part + 1, lengths + part * _OF_PART)
        features, score = _with(features, score, weights, 3 * part + 2, amount + part * _OF_PART)
        strength = tl.where(is_new, 0, 1 + _passed(share, _STRENGTH_EDGES, _STRENGTHS - 2))
        if part == _PAST:
            past, past_order = strength, longest
        else:
            own = tl.maximum(own, strength)
        if part == _PREDICTION:
            predicted = longest
        is_first = ~is_new & (first == _NUM_PARTS)
        first, first_order = tl.where(is_first, part, first), tl.where(is_first, longest, first_order)
    node, first_node, claim, level = _claimed(network, of, token)
    joint = (level * _STRENGTHS + own) * _STRENGTHS + past + _NUM_PARTS * _OF_PART
    features, score = _with(features, score, weights, 3 * _NUM_PARTS, joint)
    noise = tl.where(claim > 0, 0, _noise(memory, row, of[1], token)) + (_NUM_PARTS * _OF_PART + _OF_CLAIM)
    features, score = _with(features, score, weights, 3 * _NUM_PARTS + 1, noise)
    is_new = (first == tl.minimum(now, _NUM_PARTS)) & (tl.where(now < _NUM_PARTS, first_order, first_node) == place)
    return node, features, score, is_new, predicted, past_order


@triton.jit
def _claimed(network: tl.tuple, of: tl.tuple, token: tl.tensor) -> tl.tuple:
    """Which child of a proposed node has the token, or -1; the first node that claims the token in this place; and the
    class of what the network claims for it."""
    _, _, knows, is_claimed = of
    last, first = tl.full([_LANES], -1, tl.int32), tl.zeros([_LANES], tl.int32) + network[4]
    claim, start = tl.zeros([_LANES], tl.float32), 0
    while (is_claimed > 0) & (start < network[4]):
        node, others, claims = _claims(network, of, start)
        above = tl.load(network[1] + node, mask=claims, other=_ROOT)
        survival = tl.load(network[3] + node, mask=claims, other=0.0)
        survival = tl.div_rn(survival, tl.load(network[3] + above, mask=above >= 0, other=1.0))
        is_there = (token[:, None] == others[None, :]) & claims[None, :]
        claim = tl.maximum(claim, tl.max(tl.where(is_there, survival[None, :], 0.0), 1))
        last = tl.maximum(last, tl.max(tl.where(is_there, node[None, :], -1), 1))
        first = tl.minimum(first, tl.min(tl.where(is_there, node[None, :], network[4]), 1))
        start += _LANES
    odds = tl.div_rn(tl.where(claim > 0, claim, 0.5), tl.maximum(1 - claim, 1e-6))
    level = tl.minimum(tl.maximum(tl.floor(tl.log2(odds)) - _LEAST_ODDS, 0.0), _CLAIMS - 3.0).to(tl.int32)
    return tl.where(knows > 0, last, -1), first, claim, tl.where(claim > 0, 2 + level, is_claimed)


@triton.jit
def _noise(memory: tl.tuple, row: tl.tensor, depth: tl.tensor, token: tl.tensor) -> tl.tensor:
    """How large a token's sampling noise is: by zeros that its hash begins with; 0 where none is drawn."""
    bits = hash_bits(tl.load(memory.seeds + row), tl.load(memory.roots + row) + depth, token).to(tl.int64)
    zeros = tl.full([_LANES], 2, tl.int32)
    for place in tl.static_range(_NOISES - 3):
        zeros += (bits < (1 << (31 - place))).to(tl.int32)
    return tl.where(tl.load(memory.warm + row) != 0, tl.where(bits >= 3 << 30, 1, zeros), 0)


@triton.jit
def _with(
    features: tl.tensor, score: tl.tensor, weights: tl.tensor, group: tl.constexpr, feature: tl.tensor
) -> tl.tuple:
    """The same with one feature more."""
    groups = tl.arange(0, _GROUPS)[:, None]
    return tl.where(groups == group, feature[None, :], features), score + tl.load(weights + feature)


@triton.jit
def _chance(score: tl.tensor) -> tl.tensor:
    return tl.minimum(tl.maximum(tl.div_rn(1.0, 1.0 + tl.exp(-score)), _LOWEST), _HIGHEST)


@triton.jit
def _update(memory: tl.tuple, feature: tl.tensor, label: tl.tensor, rate: tl.tensor) -> None:
    """Learn from a candidate, before the next one is judged. # feature [GROUPS]"""
    is_one = tl.arange(0, _GROUPS) < _NUM_GROUPS
    weight = tl.load(memory.weights + feature, mask=is_one, other=0.0)
    square = tl.load(memory.squares + feature, mask=is_one, other=1.0)
    error = label - _chance(tl.sum(weight, 0))
    square += error * error
    weight += tl.div_rn(rate * error, tl.sqrt_rn(square))
    tl.debug_barrier()
    tl.store(memory.squares + feature, square, mask=is_one)
    tl.store(memory.weights + feature, weight, mask=is_one)
    tl.debug_barrier()


@triton.jit
def _count_said(
    memory: tl.tuple,
    row: tl.tensor,
    part: tl.constexpr,
    context: tl.tensor,
    age: tl.tensor,
    token: tl.tensor,
) -> None:
    """Count the token behind the context of each order."""
    seen = _hashes(memory, context[None, :], age[None, :], tl.arange(0, _EACH_ORDER))
    bucket, tag = _places(memory, row, part, seen)
    _count(memory, bucket, tag, token, bucket >= 0, _SIGHTING)


@triton.jit
def _count(
    memory: tl.tuple,
    buckets: tl.tensor,
    tags: tl.tensor,
    token: tl.tensor,
    asked: tl.tensor,
    amount: tl.constexpr,
) -> None:
    """Count sightings one after the other, for several may be of one bucket."""
    sighting, way = tl.arange(0, buckets.shape[0]), tl.arange(0, _WAYS)
    names = (tags << _TAG_PLACE) | (token.to(tl.int64) << _COUNT_BITS)
    while _any(asked):
        one = sighting == tl.min(tl.where(asked, sighting, buckets.shape[0]), 0)
        places, name = memory.entries + _of(one, buckets) * _WAYS + way, _of(one, names)
        entry = tl.load(places)
        count = entry & _MOST
        is_known, fewest = (entry - count == name) & (count > 0), tl.min(count, 0)
        rarest = way == tl.min(tl.where(count == fewest, way, _WAYS), 0)
        counted = tl.where(is_known, name | tl.minimum(count + amount, _MOST), entry)
        faded = tl.where(fewest > 0, entry - (count >> 3), entry)
        entered = tl.where(rarest, name | amount, faded)
        tl.debug_barrier()
        tl.store(places, tl.where(tl.max(is_known.to(tl.int32), 0) > 0, counted, entered))
        tl.debug_barrier()  # the next one may be of the same bucket
        asked = asked & ~one


@triton.jit
def _hashes(memory: tl.tuple, context: tl.tensor, age: tl.tensor, order: tl.tensor) -> tl.tuple:
    """What names a context's places, and whether the text is long enough.
    # context, age [lanes or 1, AGES] int64, the newest token has age 0; order [lanes] -> both [lanes]"""
    length = tl.zeros_like(order)
    for number in tl.static_range(_NUM_ORDERS):
        length = tl.where(order == number, _ORDERS[number], length)
    is_part = age < length[:, None]
    factor = tl.load(memory.factors + _NUM_ORDERS + age, mask=age < _CONTEXT, other=0)
    hashed = tl.sum(tl.where(is_part, (context + 1) * factor, 0), 1)
    hashed += tl.load(memory.factors + order, mask=length > 0, other=0)
    is_absent = is_part & (context == _NO_TOKEN)
    return hashed, (length > 0) & (tl.max(is_absent.to(tl.int32), 1) == 0)


@triton.jit
def _places(memory: tl.tuple, row: tl.tensor, part: tl.tensor, seen: tl.tuple) -> tl.tuple:
    """A part's buckets and tags of contexts; a bucket of -1 where the text is too short or the row has no such part."""
    hashed, fits = seen
    of = memory.parts + (row * _NUM_PARTS + part) * 2
    first, buckets, bits = tl.load(of), tl.load(of + 1), hashed.to(tl.uint64)
    bucket = first + ((bits >> _BUCKET_SHIFT).to(tl.int64) & (buckets - 1))
    return tl.where(fits, tl.where(buckets > 0, bucket, -1), -1), (bits >> _TAG_SHIFT).to(tl.int64) & _TAGS


@triton.jit
def _seen(memory: tl.tuple, row: tl.tensor, part: tl.tensor, seen: tl.tuple) -> tl.tuple:
    """The tokens that a part has seen behind the context of each order, and how often; 0: an empty place or another's.
    # both [LANES]"""
    _, way = _lanes()
    bucket, tag = _places(memory, row, part, seen)
    entry = tl.load(memory.entries + bucket * _WAYS + way, mask=bucket >= 0, other=0)
    is_right = (entry.to(tl.uint64) >> _TAG_PLACE).to(tl.int64) == tag
    count = tl.where(is_right, entry & _MOST, 0)
    return ((entry >> _COUNT_BITS) & _TOKENS).to(tl.int32), count.to(tl.int32)


@triton.jit
def _lanes() -> tl.tuple:
    """Order and way of each lane."""
    lane = tl.arange(0, _LANES)
    return -(lane // _WAYS) + (_NUM_ORDERS - 1), lane % _WAYS


@triton.jit
def _context(tail: tl.tensor, text: tl.tensor, place: tl.tensor, age: tl.tensor, asked: tl.tensor) -> tl.tensor:
    """The tokens before a place of a text that goes on where the tail ends."""
    is_new, before = asked & (age < place), asked & (age >= place) & (age - place < _CONTEXT)
    newer = tl.load(text + place - 1 - age, mask=is_new, other=_NO_TOKEN)
    return tl.where(is_new, newer, tl.load(tail + age - place, mask=before, other=_NO_TOKEN))


@triton.jit
def _proposals(tree: tl.tuple, first: tl.tensor, count: tl.tensor) -> tl.tuple:
    """A network's tree: tokens, parents, depths and survival, and how many nodes it has."""
    return (
        tree.tokens + first,
        tree.parents + first,
        tree.depths + first,
        tree.survival + first,
        tl.cast(count, tl.int32),
    )


@triton.jit
def _nodes(network: tl.tuple, proposed: tl.tensor, depth: tl.tensor, start: tl.tensor) -> tl.tuple:
    """Of as many nodes as there are lanes: their numbers, which are children of that one, and which are at a depth."""
    _, parents, depths, _, count = network
    node = start + tl.arange(0, _LANES)
    is_child = tl.load(parents + node, mask=node < count, other=_UNKNOWN - 1) == proposed
    return node, is_child, tl.load(depths + node, mask=node < count, other=-1) == depth


@triton.jit
def _claims(network: tl.tuple, of: tl.tuple, start: tl.tensor) -> tl.tuple:
    """Of as many nodes as there are lanes: numbers, tokens, and which of them claim a token in this place."""
    proposed, depth, knows, _ = of
    node, is_child, is_at_depth = _nodes(network, proposed, depth, start)
    claims = tl.where(knows > 0, is_child, is_at_depth)
    return node, tl.load(network[0] + node, mask=claims, other=_NO_TOKEN).to(tl.int32), claims


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
    """Copy what the network proposes, for when it is learnt from."""
    node = tl.arange(0, PROPOSED)
    at, to, exists = first + node, row * held + node, node < count
    tl.store(kept.tokens + to, tl.load(given.tokens + at, mask=exists), mask=exists)
    tl.store(kept.parents + to, tl.load(given.parents + at, mask=exists), mask=exists)
    tl.store(kept.depths + to, tl.load(given.depths + at, mask=exists), mask=exists)
    tl.store(kept.survival + to, tl.load(given.survival + at, mask=exists), mask=exists)
    tl.store(kept.num_nodes + row, count)


@triton.jit
def _write(
    tree: tl.tuple,
    place: tl.tensor,
    token: tl.tensor,
    parent: tl.tensor,
    depth: tl.tensor,
    survival: tl.tensor,
    asked: tl.tensor,
) -> None:
    tl.store(tree.tokens + place, token, mask=asked)
    tl.store(tree.parents + place, parent, mask=asked)
    tl.store(tree.depths + place, depth, mask=asked)
    tl.store(tree.survival + place, survival, mask=asked)


@triton.jit
def _right(
    tree: tl.tuple, row: tl.tensor, held: tl.tensor, text: tl.tensor, count: tl.tensor, NODES: tl.constexpr
) -> tl.tensor:
    """How many of the text's tokens stand on a path from the root."""
    node = tl.arange(0, NODES)
    exists = node < tl.load(tree.num_nodes + row)
    token = tl.load(tree.tokens + row * held + node, mask=exists, other=_NO_TOKEN)
    parent = tl.load(tree.parents + row * held + node, mask=exists, other=_UNKNOWN)
    here, right, goes_on = _ROOT, tl.cast(0, tl.int64), count > 0
    while goes_on:
        said = tl.load(text + right)
        child = tl.min(tl.where(exists & (parent == here) & (token == said), node, NODES), 0)
        right += child < NODES
        goes_on = (child < NODES) & (right < count)
        here = child
    return right


@triton.jit
def _passed(value: tl.tensor, EDGES: tl.constexpr, NUMBER: tl.constexpr) -> tl.tensor:
    """Edges below a value."""
    passed = tl.zeros(value.shape, tl.int32)
    for edge in tl.static_range(NUMBER):
        passed += (value > EDGES[edge]).to(tl.int32)
    return passed


@triton.jit
def _any(marked: tl.tensor) -> tl.tensor:
    return tl.max(marked.to(tl.int32), 0) > 0


@triton.jit
def _of(one: tl.tensor, values: tl.tensor) -> tl.tensor:
    """The value in the only place that is marked."""
    return tl.sum(tl.where(one, values, 0), 0)
