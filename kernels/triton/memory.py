# ruff: noqa: N803 - sizes that a kernel is compiled for are written in capitals
# mypy: allow-untyped-decorators
"""Device functions of the n-gram memory (`kernels/memory.py`): count tokens, look up counts, and score candidates.

Legend: lanes = the entries of one bucket of each order, the longest order first; round = candidates that are computed
together, from one part or from as many nodes of the network's tree. Candidates come in the reference's order."""

import triton
import triton.language as tl

from kernels import memory as reference
from kernels.memory import CONTEXT, FEATURES, NO_TOKEN, ORDERS, PARTS, PAST, PREDICTION, WAYS, WEIGHT_SETS
from kernels.trees import ROOT
from kernels.triton.sample import hash_bits

AGES = tl.constexpr(triton.next_power_of_2(CONTEXT))
BUCKET_LANES = tl.constexpr(triton.next_power_of_2(len(ORDERS) * WAYS))
EACH_ORDER = tl.constexpr(triton.next_power_of_2(len(ORDERS)))
NUM_GROUPS = tl.constexpr(3 * len(PARTS) + 2)  # groups of features: three for each part, a joint one, and noise
GROUPS = tl.constexpr(triton.next_power_of_2(3 * len(PARTS) + 2))

_ORDERS, _NUM_ORDERS, _CONTEXT, _WAYS = map(tl.constexpr, (ORDERS, len(ORDERS), CONTEXT, WAYS))
_NUM_PARTS, _PREDICTION, _PAST = map(tl.constexpr, (len(PARTS), PREDICTION, PAST))
_WEIGHT_SETS, _FEATURES, _NO_TOKEN = map(tl.constexpr, (WEIGHT_SETS, FEATURES, NO_TOKEN))
_ROOT, UNKNOWN = tl.constexpr(ROOT), tl.constexpr(ROOT - 1)  # no node of the network's tree
_BUCKET_SHIFT, _TAG_SHIFT = tl.constexpr(reference.BUCKET_SHIFT), tl.constexpr(reference.TAG_SHIFT)
_TAG_PLACE, _TAGS = tl.constexpr(64 - reference.TAG_BITS), tl.constexpr((1 << reference.TAG_BITS) - 1)
_COUNT_BITS, _TOKENS = tl.constexpr(reference.COUNT_BITS), tl.constexpr((1 << reference.TOKEN_BITS) - 1)
_MOST, _SIGHTING = tl.constexpr(reference.MOST_COUNT), tl.constexpr(reference.SIGHTING)
_NOISES = tl.constexpr(reference.NOISES)
_SHARE_EDGES, _SHARES = tl.constexpr(reference.SHARE_EDGES), tl.constexpr(reference.SHARES)
_TOTAL_EDGES, _TOTALS = tl.constexpr(reference.TOTAL_EDGES), tl.constexpr(reference.TOTALS)
_STRENGTH_EDGES, _STRENGTHS = tl.constexpr(reference.STRENGTH_EDGES), tl.constexpr(reference.STRENGTHS)
_CLAIMS, _LEAST_ODDS = tl.constexpr(reference.CLAIM_CLASSES), tl.constexpr(reference.LEAST_ODDS)
_LENGTHS, _OF_SHARE, _OF_KNOWN = map(tl.constexpr, (reference.LENGTHS, reference.OF_SHARE, reference.OF_KNOWN))
_OF_PART, _OF_CLAIM = map(tl.constexpr, (reference.OF_PART, reference.OF_CLAIM))
_LOWEST, _HIGHEST = map(tl.constexpr, reference.CHANCE_LIMITS)


@triton.jit
def expand(
    memory: tl.tuple,
    row: tl.tensor,
    network: tl.tuple,
    proposed: tl.tensor,
    depth: tl.tensor,
    context: tl.tensor,
    age: tl.tensor,
) -> tl.tuple:
    """Prepare the candidates after a node; returns the argument `after` of `offered` and `weigh`, and the number of
    rounds. `after` is: row; network; the node in the network's tree, the candidates' depth, whether the node has
    children in that tree, and whether the tree claims any token at this position; hashes of the context; index of the
    set's first weight. # context, age [AGES]"""
    order, _ = order_and_way()
    seen = hash_contexts(memory, context.to(tl.int64)[None, :], age[None, :], order)
    knows, is_claimed, start = tl.cast(0, tl.int32), tl.cast(0, tl.int32), 0
    while start < network[4]:
        _, is_child, is_at_depth = proposed_nodes(network, proposed, depth, start)
        knows = tl.maximum(knows, tl.max(is_child.to(tl.int32), 0))
        is_claimed = tl.maximum(is_claimed, tl.max((is_child | is_at_depth).to(tl.int32), 0))
        start += BUCKET_LANES
    weight_set = 2 * tl.load(memory.warm + row).to(tl.int64) + knows
    first_weight = (tl.load(memory.scopes + row) * _WEIGHT_SETS + weight_set) * _FEATURES
    rounds = tl.where(is_claimed > 0, tl.cdiv(network[4], BUCKET_LANES), 0) + _NUM_PARTS
    return (row, network, (proposed, depth, knows, is_claimed), seen, first_weight), rounds


@triton.jit
def offered(memory: tl.tuple, after: tl.tuple, now: tl.tensor) -> tl.tuple:
    """Return the candidates of a round: token, place (order in a part, or node of the network's tree), and whether the
    lane has a candidate. # each [BUCKET_LANES]"""
    row, network, of, seen, _ = after
    place, _ = order_and_way()
    if now < _NUM_PARTS:
        token, count = entries_of(memory, row, now, seen)
        exists = count > 0
    else:
        place, token, exists = claims_of(network, of, (now - _NUM_PARTS) * BUCKET_LANES)
    return token, place, exists


@triton.jit
def weigh(memory: tl.tuple, after: tl.tuple, now: tl.tensor, token: tl.tensor, place: tl.tensor) -> tl.tuple:
    """Score a round's candidates. Returns for each: its node in the network's tree or -1; its features; the sum of
    their weights, in the order of groups; whether it is new (in no earlier part, after no longer context, and claimed
    by no earlier node); and the longest orders at which the prediction and past answers have it, or -1.
    # token, place [BUCKET_LANES] -> features [GROUPS, BUCKET_LANES], the others like token"""
    row, network, of, seen, first_weight = after
    order, _ = order_and_way()
    weights = memory.weights + first_weight
    first, first_order = tl.full([BUCKET_LANES], _NUM_PARTS, tl.int32), tl.full([BUCKET_LANES], -1, tl.int32)
    own, past, predicted, past_order = tl.zeros_like(first), tl.zeros_like(first), first_order, first_order
    features, score = tl.zeros([GROUPS, BUCKET_LANES], tl.int32), tl.zeros([BUCKET_LANES], tl.float32)
    for part in tl.static_range(_NUM_PARTS):
        others, counts = entries_of(memory, row, part, seen)
        known = tl.max(tl.where(counts > 0, order, -1), 0)
        is_there = (token[:, None] == others[None, :]) & (counts > 0)[None, :]
        longest = tl.max(tl.where(is_there, order[None, :], -1), 1)
        of_longest = order[None, :] == longest[:, None]
        count = tl.sum(tl.where(is_there & of_longest, counts[None, :], 0), 1).to(tl.float32) / _SIGHTING
        total = tl.sum(tl.where(of_longest, counts[None, :], 0), 1).to(tl.float32) / _SIGHTING
        is_new, share = longest < 0, tl.div_rn(count, tl.maximum(total, 1 / _SIGHTING))
        shared = tl.where(is_new, _OF_SHARE - 1, longest * _SHARES + _num_below(share, _SHARE_EDGES, _SHARES - 1))
        lengths = (known + 1) * _LENGTHS + longest + 1 + _OF_SHARE
        amount = tl.where(is_new, _TOTALS, _num_below(total, _TOTAL_EDGES, _TOTALS - 1)) + (_OF_SHARE + _OF_KNOWN)
        features, score = _with_feature(features, score, weights, 3 * part, shared + part * _OF_PART)
        features, score = _with_feature(features, score, weights, 3 * part + 1, lengths + part * _OF_PART)
        features, score = _with_feature(features, score, weights, 3 * part + 2, amount + part * _OF_PART)
        strength = tl.where(is_new, 0, 1 + _num_below(share, _STRENGTH_EDGES, _STRENGTHS - 2))
        if part == _PAST:
            past, past_order = strength, longest
        else:
            own = tl.maximum(own, strength)
        if part == _PREDICTION:
            predicted = longest
        is_first = ~is_new & (first == _NUM_PARTS)
        first, first_order = tl.where(is_first, part, first), tl.where(is_first, longest, first_order)
    node, first_node, claim, level = _claim_of(network, of, token)
    joint = (level * _STRENGTHS + own) * _STRENGTHS + past + _NUM_PARTS * _OF_PART
    features, score = _with_feature(features, score, weights, 3 * _NUM_PARTS, joint)
    noise = tl.where(claim > 0, 0, _noise(memory, row, of[1], token)) + (_NUM_PARTS * _OF_PART + _OF_CLAIM)
    features, score = _with_feature(features, score, weights, 3 * _NUM_PARTS + 1, noise)
    is_new = (first == tl.minimum(now, _NUM_PARTS)) & (tl.where(now < _NUM_PARTS, first_order, first_node) == place)
    return node, features, score, is_new, predicted, past_order


@triton.jit
def _claim_of(network: tl.tuple, of: tl.tuple, token: tl.tensor) -> tl.tuple:
    """Find the network's claim of each token at this position: the child of the proposed node with the token, or -1;
    the first node that claims the token; the claimed probability; and its class."""
    _, _, knows, is_claimed = of
    last, first = tl.full([BUCKET_LANES], -1, tl.int32), tl.zeros([BUCKET_LANES], tl.int32) + network[4]
    claim, start = tl.zeros([BUCKET_LANES], tl.float32), 0
    while (is_claimed > 0) & (start < network[4]):
        node, others, claims = claims_of(network, of, start)
        above = tl.load(network[1] + node, mask=claims, other=_ROOT)
        survival = tl.load(network[3] + node, mask=claims, other=0.0)
        survival = tl.div_rn(survival, tl.load(network[3] + above, mask=above >= 0, other=1.0))
        is_there = (token[:, None] == others[None, :]) & claims[None, :]
        claim = tl.maximum(claim, tl.max(tl.where(is_there, survival[None, :], 0.0), 1))
        last = tl.maximum(last, tl.max(tl.where(is_there, node[None, :], -1), 1))
        first = tl.minimum(first, tl.min(tl.where(is_there, node[None, :], network[4]), 1))
        start += BUCKET_LANES
    odds = tl.div_rn(tl.where(claim > 0, claim, 0.5), tl.maximum(1 - claim, 1e-6))
    level = tl.minimum(tl.maximum(tl.floor(tl.log2(odds)) - _LEAST_ODDS, 0.0), _CLAIMS - 3.0).to(tl.int32)
    return tl.where(knows > 0, last, -1), first, claim, tl.where(claim > 0, 2 + level, is_claimed)


@triton.jit
def _noise(memory: tl.tuple, row: tl.tensor, depth: tl.tensor, token: tl.tensor) -> tl.tensor:
    """Compute the class of a token's sampling noise by the leading zeros of its hash; 0 at temperature 0."""
    bits = hash_bits(tl.load(memory.seeds + row), tl.load(memory.roots + row) + depth, token).to(tl.int64)
    zeros = tl.full([BUCKET_LANES], 2, tl.int32)
    for place in tl.static_range(_NOISES - 3):
        zeros += (bits < (1 << (31 - place))).to(tl.int32)
    return tl.where(tl.load(memory.warm + row) != 0, tl.where(bits >= 3 << 30, 1, zeros), 0)


@triton.jit
def _with_feature(
    features: tl.tensor, score: tl.tensor, weights: tl.tensor, group: tl.constexpr, feature: tl.tensor
) -> tl.tuple:
    """Add one group's feature to the features, and its weight to the score."""
    groups = tl.arange(0, GROUPS)[:, None]
    return tl.where(groups == group, feature[None, :], features), score + tl.load(weights + feature)


@triton.jit
def chance(score: tl.tensor) -> tl.tensor:
    """Compute a candidate's probability: the sigmoid of its score, within CHANCE_LIMITS."""
    return tl.minimum(tl.maximum(tl.div_rn(1.0, 1.0 + tl.exp(-score)), _LOWEST), _HIGHEST)


@triton.jit
def count_sightings(
    memory: tl.tuple,
    buckets: tl.tensor,
    tags: tl.tensor,
    token: tl.tensor,
    active: tl.tensor,
    amount: tl.constexpr,
) -> None:
    """Count occurrences of weight `amount`, one after the other, because several may fall into one bucket."""
    sighting, way = tl.arange(0, buckets.shape[0]), tl.arange(0, _WAYS)
    names = (tags << _TAG_PLACE) | (token.to(tl.int64) << _COUNT_BITS)
    while any_of(active):
        one = sighting == tl.min(tl.where(active, sighting, buckets.shape[0]), 0)
        places, name = memory.entries + value_of(one, buckets) * _WAYS + way, value_of(one, names)
        entry = tl.load(places)
        count = entry & _MOST
        is_known, fewest = (entry - count == name) & (count > 0), tl.min(count, 0)
        rarest = way == tl.min(tl.where(count == fewest, way, _WAYS), 0)
        counted = tl.where(is_known, name | tl.minimum(count + amount, _MOST), entry)
        faded = tl.where(fewest > 0, entry - (count >> 3), entry)
        entered = tl.where(rarest, name | amount, faded)
        tl.debug_barrier()
        tl.store(places, tl.where(tl.max(is_known.to(tl.int32), 0) > 0, counted, entered))
        tl.debug_barrier()  # the next occurrence may fall into the same bucket
        active = active & ~one


@triton.jit
def hash_contexts(memory: tl.tuple, context: tl.tensor, age: tl.tensor, order: tl.tensor) -> tl.tuple:
    """Compute the hashes of contexts, and whether the sequence is long enough for them.
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
def buckets_of(memory: tl.tuple, row: tl.tensor, part: tl.tensor, seen: tl.tuple) -> tl.tuple:
    """Return buckets and tags of contexts in a part; bucket -1 if the sequence is too short or the part is missing."""
    hashed, fits = seen
    of = memory.parts + (row * _NUM_PARTS + part) * 2
    first, buckets, bits = tl.load(of), tl.load(of + 1), hashed.to(tl.uint64)
    bucket = first + ((bits >> _BUCKET_SHIFT).to(tl.int64) & (buckets - 1))
    return tl.where(fits, tl.where(buckets > 0, bucket, -1), -1), (bits >> _TAG_SHIFT).to(tl.int64) & _TAGS


@triton.jit
def entries_of(memory: tl.tuple, row: tl.tensor, part: tl.tensor, seen: tl.tuple) -> tl.tuple:
    """Look up the tokens that a part has counted after the context of each order, and their counts; the count is 0 for
    an empty entry or one of another context. # both [BUCKET_LANES]"""
    _, way = order_and_way()
    bucket, tag = buckets_of(memory, row, part, seen)
    entry = tl.load(memory.entries + bucket * _WAYS + way, mask=bucket >= 0, other=0)
    is_right = (entry.to(tl.uint64) >> _TAG_PLACE).to(tl.int64) == tag
    count = tl.where(is_right, entry & _MOST, 0)
    return ((entry >> _COUNT_BITS) & _TOKENS).to(tl.int32), count.to(tl.int32)


@triton.jit
def order_and_way() -> tl.tuple:
    """Return order and way (entry of the bucket) of each lane."""
    lane = tl.arange(0, BUCKET_LANES)
    return -(lane // _WAYS) + (_NUM_ORDERS - 1), lane % _WAYS


@triton.jit
def context_of(tail: tl.tensor, text: tl.tensor, place: tl.tensor, age: tl.tensor, active: tl.tensor) -> tl.tensor:
    """Load the tokens before position `place` of a text that continues the tail."""
    is_new, before = active & (age < place), active & (age >= place) & (age - place < _CONTEXT)
    newer = tl.load(text + place - 1 - age, mask=is_new, other=_NO_TOKEN)
    return tl.where(is_new, newer, tl.load(tail + age - place, mask=before, other=_NO_TOKEN))


@triton.jit
def proposals_of(tree: tl.tuple, first: tl.tensor, count: tl.tensor) -> tl.tuple:
    """Return addresses of a network tree's tokens, parents, depths and survival, and its number of nodes."""
    return (
        tree.tokens + first,
        tree.parents + first,
        tree.depths + first,
        tree.survival + first,
        tl.cast(count, tl.int32),
    )


@triton.jit
def proposed_nodes(network: tl.tuple, proposed: tl.tensor, depth: tl.tensor, start: tl.tensor) -> tl.tuple:
    """Load one node per lane: its index, whether it is a child of node `proposed`, and whether it is at the depth."""
    _, parents, depths, _, count = network
    node = start + tl.arange(0, BUCKET_LANES)
    is_child = tl.load(parents + node, mask=node < count, other=UNKNOWN - 1) == proposed
    return node, is_child, tl.load(depths + node, mask=node < count, other=-1) == depth


@triton.jit
def claims_of(network: tl.tuple, of: tl.tuple, start: tl.tensor) -> tl.tuple:
    """Load one node per lane: its index, its token, and whether it claims the token at this position."""
    proposed, depth, knows, _ = of
    node, is_child, is_at_depth = proposed_nodes(network, proposed, depth, start)
    claims = tl.where(knows > 0, is_child, is_at_depth)
    return node, tl.load(network[0] + node, mask=claims, other=_NO_TOKEN).to(tl.int32), claims


@triton.jit
def _num_below(value: tl.tensor, EDGES: tl.constexpr, NUMBER: tl.constexpr) -> tl.tensor:
    """Count the edges below each value."""
    passed = tl.zeros(value.shape, tl.int32)
    for edge in tl.static_range(NUMBER):
        passed += (value > EDGES[edge]).to(tl.int32)
    return passed


@triton.jit
def any_of(marked: tl.tensor) -> tl.tensor:
    """Whether any lane is marked."""
    return tl.max(marked.to(tl.int32), 0) > 0


@triton.jit
def value_of(one: tl.tensor, values: tl.tensor) -> tl.tensor:
    """Return the value of the only marked lane."""
    return tl.sum(tl.where(one, values, 0), 0)
