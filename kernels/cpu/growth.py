"""Compiled op of `kernels.lattice`: one native call from waiting entries to trees."""

from collections.abc import Sequence
from ctypes import c_void_p, cast

import torch
from torch import Tensor

from kernels.cpu.entries import tables_of
from kernels.cpu.layers import CompiledLayers, PackedLinear, PackedWeight, as_tensor, plan_layers
from kernels.cpu.library import CStruct, call, contiguous, function
from kernels.cpu.trees import empty_tree, log_of, trees_of
from kernels.lattice import BlockNetwork, BlockTables, GrowBlock, GrownTree, HostSizes, Keys
from kernels.layers import Product, Weight
from kernels.survival import CEILING

_READ = 0, 1, 4  # by level of the noise: how many of temperatures and filters are read; the others are null


class CompiledGrowth:
    """Growth of one block per sequence in one native call."""

    def __init__(
        self, network: BlockNetwork, tables: BlockTables, max_nodes: int, layers: CompiledLayers, embed: CStruct
    ) -> None:
        self._entries, self._log = tables_of(tables.entries), log_of(tables.proposed)
        self._scratch, self._dtype = tables.scratch, network.queries.dtype
        self._block, self._hidden = network.queries.shape
        self._vocab, ranks = tables.d2t.shape[0], tables.buckets.shape[1]
        self._nodes = min(max_nodes, self._block * ranks)
        heads = network.condition, network.known, network.head, network.rank_hidden, network.rank_classes
        shifts = as_tensor(b"".join(_structures(network.shifts))) if network.shifts else None
        sizes = len(network.layers), network.parts, network.broadcast, self._block
        self._kept = network, layers  # whose memory the structure points to
        self._network = CStruct(
            *[word for structure in _structures(heads) for word in structure.words],
            layers.joined,
            shifts,
            network.feature_norms,
            *(network.condition_norm, network.token_norm, network.queries, network.output_norm, network.rank_norm),
            *embed.words,
            *(tables.rotary, tables.d2t, tables.buckets, tables.d2t.to(torch.int32), tables.rates),
            *(*sizes, tables.rotary.shape[1], tables.scratch.stride(0), layers.scratch),
            floats=(network.epsilon, network.rank_epsilon, network.feature_scale, CEILING, tables.least),
        )
        self._results: dict[int, tuple[GrownTree, CStruct]] = {}  # by batch

    def __call__(self, keys: Keys, sizes: HostSizes) -> GrownTree:
        """See `GrowBlock`. # keys [batch]"""
        batch = keys.rows.shape[0]
        drawn = (keys.temperatures, *keys.filters)[: _READ[sizes.noise]]
        given = *contiguous(keys.rows, keys.seeds, keys.roots, *drawn), *[None] * (_READ[-1] - len(drawn))
        if batch not in self._results:
            self._results[batch] = self._buffers(batch)
        grown, tree = self._results[batch]
        stand = self._network, self._entries, self._log
        call(
            "grow_block",
            *stand,
            *given,
            batch,
            sizes.waiting,
            self._scratch,
            grown.states,
            grown.logits,
            tree,
            dtype=self._dtype,
        )
        return grown

    def _buffers(self, batch: int) -> tuple[GrownTree, CStruct]:
        states = torch.empty(batch, self._block, self._hidden, dtype=self._dtype)
        logits = torch.empty(batch, self._block, self._vocab, dtype=self._dtype)
        tree = empty_tree(batch, self._nodes)
        return GrownTree(tree, states, logits), trees_of(tree)


def plan_growth(network: BlockNetwork, tables: BlockTables, max_nodes: int) -> GrowBlock | None:
    """Same as the reference op, in one native call. Returns None unless all products are packed."""
    products = network.condition, network.known, network.head, network.rank_classes, *network.shifts
    layers, embed = plan_layers(network.layers, list(tables.pool)), _lookup_of(tables.embedding, network.queries.dtype)
    packed = all(isinstance(one, PackedLinear) and not one.missing for one in products)
    if embed is None or not packed or not isinstance(layers, CompiledLayers):
        return None
    return CompiledGrowth(network, tables, max_nodes, layers, embed)


def _structures(products: Sequence[Product]) -> list[CStruct]:
    return [product.structure for product in products if isinstance(product, PackedLinear)]


def _lookup_of(embedding: Weight, dtype: torch.dtype) -> CStruct | None:
    """Return the C function that looks up rows of a table, and its first argument. Returns None for a table of another
    type than the network's."""
    if embedding.dtype != dtype:
        return None
    if isinstance(embedding, PackedWeight):
        return CStruct(_address("lookup_quantised", dtype), as_tensor(embedding.only_part))
    assert isinstance(embedding, Tensor)
    return CStruct(_address("look_up_rows", dtype), embedding.detach().contiguous())


def _address(name: str, dtype: torch.dtype) -> int | None:
    return cast(function(name, dtype), c_void_p).value
