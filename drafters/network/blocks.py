"""Grows a draft tree block by block. Its steps can run eagerly or as captured graphs: apart from their arguments, they
read and write only tensors whose address does not change.
Legend: batch, rows = sequences of the engine's table, starts = blocks begun at once, block = K, rank = features.TOP,
nodes (of one forward) = starts * block * rank, live as in serving.py."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from drafters.calibration import RankCalibration
from drafters.coupling import TreeNoise
from drafters.feedback import NOWHERE
from drafters.network.heads import propose
from drafters.network.layers import Embed
from drafters.network.pool import WAITING, EntryPool, EntryState, Waiting
from drafters.network.recording import FeedbackRecorder
from drafters.network.served import ServingNetwork
from drafters.network.serving import BlockForward, Live, forward_of
from drafters.protocol import DraftingSizes, Noise, ignore
from drafters.slots import taken_slots
from drafters.tree import MAX_DEPTH, DraftTree
from kernels.graph_runner import GraphRunner, by_batch
from kernels.lattice import BlockNetwork, BlockTables, GrowBlock, HostSizes, Keys, Picked, StartNodes
from kernels.layers import Embedding
from kernels.sample import Filters
from kernels.survival import CEILING

COUNTS = (4, 16, WAITING)
"""Numbers of waiting entries for which graphs are captured."""


Attempt = Callable[[Callable[[], None], Callable[[], None], str], None]
"""Runs a call, or if it raises the second one; the third argument names the call in logs."""


@dataclass(frozen=True, slots=True)
class TrainedWeights:
    """A trained network with the target's embedding, and the parameters by which its trees grow."""

    network: ServingNetwork
    embed: Embed
    blocks: int = 2  # M, forwards per tree
    starts: int = 4  # blocks that each further forward starts
    recorder: FeedbackRecorder | None = None  # records training data of running sequences
    attempt: Attempt = lambda call, otherwise, name: call()  # calls the recorder, and `otherwise` if that raises
    version: Callable[[], int] = lambda: 0  # current weight version of `network`
    ready: Callable[[], bool] = lambda: True  # False: weights are not initialised, so nothing is drafted

    def record(self, name: str, call: Callable[[FeedbackRecorder], None]) -> None:
        """Make a `call` to the recorder, if there is one; `name`: of the call, for logs. If it raises, the recordings
        of running sequences are dropped."""
        if self.recorder is not None:
            self.attempt(partial(call, self.recorder), self.recorder.forget, name)


class TreeStart(NamedTuple):
    """Sampling keys and noise that all blocks of a tree share."""

    keys: Keys
    noise: TreeNoise


class ForwardNodes(NamedTuple):
    """The nodes that one forward adds, all [batch, nodes]; parents are indices among the nodes of all forwards."""

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    survival: Tensor
    predicted: Tensor  # conditional probabilities before correction
    buckets: Tensor  # [nodes] int64, of `RankCalibration`


class NextStarts(NamedTuple):
    """Inputs of the next forward, whose blocks start at nodes of the current one."""

    picked: Picked
    states: Tensor  # [batch, starts, block, width]
    live: Live


class GrownBlock(NamedTuple):
    """Nodes that one forward adds to a tree, and the inputs of the next forward."""

    nodes: ForwardNodes
    next_starts: tuple[NextStarts, ...]  # one; none after the last forward of a tree


class TreeGrower:
    """Grows blocks from committed entries, merges them into one tree, and learns from the accepted tokens. The
    attributes `begin`, `follow` (one per further forward), `tree`, `take_in` and `pass_by` run the methods below,
    eagerly or as graphs captured in a few shapes: batches are padded with a dummy row, and waiting entries with entries
    to which nothing attends."""

    def __init__(self, sizes: DraftingSizes, weights: TrainedWeights) -> None:
        network, config = weights.network, weights.network.config
        self._weights, self._sizes = weights, sizes
        further = 0 if network.traits.one_forward else (weights.blocks - 1) * weights.starts * config.block_size
        live = config.forward_size - config.cached_entries + further
        self.pool = EntryPool(network, sizes.num_slots, sequences=sizes.max_sequences, live=live)
        self.state = EntryState(sizes, self.pool, config.features_size, network.dtype)
        self._forward = forward_of(network, weights.embed, self.pool, self.state)
        self.calibration = RankCalibration(config.block_size, sizes)
        capture, most = sizes.capture, sizes.max_sequences
        self._plan: tuple[BlockNetwork | None, GrowBlock | None] = None, None  # the growth as one op, for these weights
        padding = self.state.padding(most)
        self.take_in = by_batch(self._take_in, capture, most, padding)
        rows, _, counts, slots, _, tokens = padding
        self.pass_by = by_batch(self._pass_by, capture, most, (rows, counts, slots, tokens))
        zeros = torch.zeros_like(rows)
        keys = Keys(rows, zeros, zeros.float(), zeros, Filters.off(zeros))
        begun = [(keys, HostSizes(count, level)) for level, count in product((2, 1, 0), reversed(COUNTS))]
        self.begin = by_batch(self._begin, capture, most, *begun)
        # The shapes of further forwards do not depend on the number of waiting entries.
        grown: list[tuple[TreeStart, tuple[GrownBlock, ...]]] = [
            (start, (first,)) for start, first in self.begin.results[:: len(COUNTS)]
        ]
        self.follow: list[GraphRunner[GrownBlock]] = []
        for _ in range(1, weights.blocks):
            runner = GraphRunner(self._follow, capture, (((), given) for given in grown))
            self.follow.append(runner)
            grown = [(start, (*blocks, last)) for (start, blocks), last in zip(grown, runner.results, strict=True)]
        of_batches = grown[::3]  # shapes of trees do not depend on the noise
        numbers = range(weights.blocks, 0, -1)
        trees = (((), tree_inputs(start, blocks[:number])) for number, (start, blocks) in product(numbers, of_batches))
        self.tree = GraphRunner(self._tree, capture, trees)

    def grow(self, keys: Keys, sizes: HostSizes, ask: Callable[[int, Tensor], bool]) -> tuple[DraftTree, int]:
        """Grow a tree for each sequence. `ask` decides on each further forward by its number and the survival of the
        nodes at which it would start [batch, starts]. Returns also the number of blocks, over all sequences."""
        planned = self._planned()
        if planned is not None:
            return self._grow_planned(planned, keys, sizes), keys.rows.shape[0]
        batch = keys.rows.shape[0]
        start, first = self.begin((keys, sizes))
        grown: tuple[GrownBlock, ...] = (first,)  # valid until the next call
        num_blocks = batch
        for number, follow in enumerate(self.follow):
            expected = grown[-1].next_starts[0].picked.origin.survival[:batch]
            if not ask(number, expected):
                break
            grown = (*grown, follow((), (start, grown)))
            num_blocks += expected.numel()
        return self.tree((), tree_inputs(start, grown)).first(batch), num_blocks

    def _planned(self) -> GrowBlock | None:
        """Return the growth as one op for the current weights. Returns None if it is not supported."""
        network, embed, forward = self._weights.network.block_network, self._weights.embed, self._forward
        is_composed = self.follow or self._sizes.capture is not None or self._sizes.observer is not ignore
        if is_composed or type(forward) is not BlockForward or not isinstance(embed, Embedding) or network is None:
            return None
        if self._plan[0] is not network:
            tables = BlockTables(
                self.state.tables,
                self.pool.storage,
                self.pool.scratch_places,
                forward.rotary.table,
                embed.weight,
                self._weights.network.d2t,
                self.calibration.proposed,
                self.calibration.buckets(0),
                self.calibration.rates,
                self._sizes.least_survival,
            )
            self._plan = network, self._weights.network.ops.plan_growth(network, tables, self._sizes.max_nodes)
        return self._plan[1]

    def _grow_planned(self, planned: GrowBlock, keys: Keys, sizes: HostSizes) -> DraftTree:
        """Grow trees of one block by one op."""
        tree, states, logits = planned(keys, sizes)
        self._weights.record(
            "grown",
            lambda recorder: recorder.grown(
                keys.rows, keys.roots.where(tree.num_nodes > 0, NOWHERE), states, logits
            ),  # without an anchor no node grows
        )
        return tree

    def ingest(self, rows: Tensor, waiting: Waiting) -> None:
        """Run waiting entries without drafting, so that later blocks attend to them. # rows [batch]"""
        self._forward.ingest(rows, waiting)

    def _begin(self, keys: Keys, sizes: HostSizes) -> tuple[TreeStart, GrownBlock]:
        """Run the waiting entries, and the block at the newest of them."""
        waiting = self.state.take(keys.rows, sizes.waiting)
        anchored = waiting.positions[:, -1] >= 0  # False: no entry waits, so there is no anchor and the tree is empty
        filters = keys.filters if sizes.noise > 1 else Filters.off(keys.rows[:0])
        noise = Noise(keys.seeds, keys.temperatures, keys.roots, sizes.noise > 0, filters=filters)
        network = self._weights.network
        depth = self._weights.blocks * network.config.block_size
        start = TreeStart(keys, TreeNoise.of(noise, depth, network.d2t))
        states, live = self._forward.first(keys.rows, waiting)  # [batch, 1, block, width]
        root = StartNodes.root(keys.rows.shape[0], keys.rows.device)
        root = root._replace(survival=root.survival * anchored[:, None])
        block, logits = self._block(states, live, root, start, [])
        if self._weights.recorder is not None:
            roots, read = keys.roots.where(anchored, NOWHERE), self._for_heads(states)[:, 0]
            self._weights.record("grown", lambda recorder: recorder.grown(keys.rows, roots, read, logits[:, 0]))
        return start, block

    def _follow(self, start: TreeStart, before: Sequence[GrownBlock]) -> GrownBlock:
        """Run the blocks that start at nodes of the previous forward."""
        picked, states, live = before[-1].next_starts[0]
        states, live = self._forward.next(states, picked, live, start.keys.roots)
        return self._block(states, live, picked.origin, start, before)[0]

    def _tree(self, rows: Tensor, grown: Sequence[ForwardNodes]) -> DraftTree:
        """Merge the nodes of all forwards into one tree, and keep it for the calibration. # rows [batch]"""
        tokens, parents, depths, survival, predicted, buckets = grown[0]
        if len(grown) > 1:
            values = (torch.cat(part, dim=-1) for part in zip(*grown, strict=True))
            tokens, parents, depths, survival, predicted, buckets = values
        ops = self._weights.network.ops
        merge = ops.merge_trees if len(grown) > 1 else ops.likeliest_nodes  # paths within one forward all differ
        raw = DraftTree(tokens, parents, depths, survival, num_nodes=rows)  # `num_nodes` of a raw tree is not read
        tree, chosen = merge(raw, self._sizes.max_nodes)
        self.calibration.keep(rows, tree, chosen, predicted, buckets)
        return tree

    def _take_in(
        self, rows: Tensor, positions: Tensor, counts: Tensor, slots: Tensor, features: Tensor, tokens: Tensor
    ) -> Tensor:
        """Update the calibration, and queue the committed entries for the next forward. For the arguments see
        `EntryState.wait`. # -> [2], see `RankCalibration.learn`"""
        self.state.wait(rows, positions, counts, slots, features, tokens)
        return self.calibration.learn(rows, tokens, counts)

    def _pass_by(self, rows: Tensor, counts: Tensor, slots: Tensor, tokens: Tensor) -> Tensor:
        """Update the calibration, and mark the slots of the committed positions as never run. # -> [2], see
        `RankCalibration.learn`"""
        self.pool.forget(taken_slots(slots, counts))
        return self.calibration.learn(rows, tokens, counts)

    def _block(
        self, states: Tensor, live: Live, origin: StartNodes, start: TreeStart, before: Sequence[GrownBlock]
    ) -> tuple[GrownBlock, Tensor]:
        """Return the nodes of one forward's blocks, and its logits. # states [batch, starts, block, width]"""
        number, network = len(before), self._weights.network
        ahead = torch.arange(states.shape[2], device=states.device)
        proposal = propose(network, self._for_heads(states), origin.depth[..., None] + 1 + ahead, start.noise)
        is_last, paths = number + 1 == self._weights.blocks, network.traits.paths
        first_number = sum(block.nodes.tokens.shape[1] for block in before)
        offered = origin, proposal.tokens, proposal.predicted, self.calibration.trust(number)
        starts = 0 if is_last else self._weights.starts
        least = self._sizes.least_survival
        lattice, picked = network.ops.grow_lattice(*offered, first_number, least, starts)
        self._sizes.observer(lattice, proposal.logits, network.d2t)
        buckets = self.calibration.buckets(number).flatten()
        if paths > 1:
            grown = path_nodes(*offered, least, paths=paths)
            nodes = ForwardNodes(*grown, proposal.predicted.expand(-1, paths, -1, -1).flatten(1), buckets.repeat(paths))
            return GrownBlock(nodes, ()), proposal.logits
        nodes = ForwardNodes(*lattice.nodes(), proposal.predicted.flatten(1), buckets.repeat(states.shape[1]))
        return GrownBlock(nodes, () if is_last else (NextStarts(picked, states, live),)), proposal.logits

    def _for_heads(self, states: Tensor) -> Tensor:
        """Return the part of the states that the heads read. # states [..., width] -> [..., hidden]"""
        return states[..., : self._weights.network.config.hidden_size].contiguous()


def tree_inputs(start: TreeStart, grown: Sequence[GrownBlock]) -> tuple[Tensor, tuple[ForwardNodes, ...]]:
    """Return the arguments of `TreeGrower.tree`. # -> rows [batch], and each forward's nodes"""
    return start.keys.rows, tuple(block.nodes for block in grown)


def path_nodes(
    origin: StartNodes, tokens: Tensor, predicted: Tensor, trust: Tensor, least: float, *, paths: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return tokens, parents, depths and survival of the nodes of a block at the root, if its distributions do not
    depend on the path. At each position the likeliest `paths` paths continue, each with all ranks. Survival below
    `least` becomes 0. # tokens, predicted [batch, 1, block, rank], trust [block, rank] -> four [batch, paths * block *
    rank], in the order path, position, rank"""
    block, ranks = tokens.shape[2:]
    numbers = torch.arange(paths * block * ranks, device=tokens.device).view(paths, block, ranks)
    depths = origin.depth[..., None] + 1 + torch.arange(block, device=tokens.device)  # [batch, 1, block]
    conditional = (predicted * trust).clamp(max=CEILING) * (depths <= MAX_DEPTH)[..., None]
    above, parent = pad(origin.survival, (0, paths - 1)), origin.node.expand(-1, paths)  # both [batch, paths]
    surviving, parents = list[Tensor](), list[Tensor]()
    for position in range(block):
        parents.append(parent)
        surviving.append(above[:, :, None] * conditional[:, :, position])  # [batch, paths, rank]
        above, best = surviving[-1].flatten(1).topk(paths, dim=1)
        parent = numbers[:, position].flatten()[best]
    wide, survival = (-1, paths, -1, ranks), torch.stack(surviving, dim=2)
    return (
        tokens.expand(wide).flatten(1),
        torch.stack(parents, dim=2)[..., None].expand(wide).flatten(1),
        depths.clamp(max=MAX_DEPTH)[..., None].expand(wide).flatten(1),
        (survival * (survival >= least)).flatten(1),
    )
