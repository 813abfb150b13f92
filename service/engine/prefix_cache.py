"""The prefix cache: KV slots of computed tokens, shared by sequences with the same prefix, in a radix tree over token
ids.

The slot of position t is stored under the tokens 0..t + 1, one more than its keys and values depend on: a drafter's
entry of position t needs the next token, and the last token of a prompt is always run again for its logits. A row's
result does not depend on the other rows of its forward, so cached keys and values equal recomputed ones bit for bit.
In layers with a window, slots may lose their places (`Windows`): the cache keeps those before the ends of nodes, where
messages end and prompts part, and a prefix is found only as far as the window before its end still has its places.
Legend: labels = tokens on the edge to a node, one per slot of the node; placed = with a place in layers with a window.
"""

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import torch
from torch import Tensor

from service.engine.kv_pool import Windows

_SHARE_AT_ONCE = 32  # of so many places one is taken at least, so that few steps take any

_WORTH_WAITING = 64
"""Minimum number of tokens that another sequence is about to compute, for waiting to beat computing them again."""


@dataclass(slots=True, eq=False)
class Node:
    """Radix tree node: the slots of a run of tokens. It is locked while a lease ends at it or below it."""

    labels: list[int]
    slots: Tensor  # [labels] int64
    parent: "Node | None"
    key: tuple[str, int] | None = None  # namespace and first token of the cached texts; None except in roots
    children: dict[int, "Node"] = field(default_factory=dict)  # children by their first label
    leases: int = 0  # number of leases that end at this node or below it
    last_used: int = 0  # counter of the cache's calls at the last use
    placed_from: int = 0  # first label from which on all slots are placed
    last_seen: int = 0  # counter of the cache's calls when the window before its end was last needed

    @property
    def is_evictable(self) -> bool:
        """Whether neither a lease nor a longer cached prefix needs this node."""
        return self.leases == 0 and not self.children and self.parent is not None

    def upwards(self) -> Iterator["Node"]:
        """Iterate over this node and its ancestors, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


@dataclass(slots=True, eq=False)
class PrefixLease:
    """Protects the cached prefix of a running sequence from eviction until it is released."""

    node: Node
    length: int  # number of the sequence's leading positions whose slots belong to the cache
    slots: Tensor  # [cached] int64, slots of the prefix that was found when the lease was acquired
    is_published: bool = False  # whether the rest of the prompt has been published
    placed_from: int = 0  # first position from which on all slots of the sequence itself are placed
    parting: int = 0  # end of a prefix that the cache has without places, which gets the window before it from this
    # sequence; 0 if there is none


Running = tuple[PrefixLease, int, list[int], Tensor]
"""A running sequence: its lease, number of computed positions, tokens, and row of the slot table."""


class PrefixCache:
    """Keeps the slots of running and ended sequences for reuse, until they are evicted.

    Namespaces (`Scope.cache_namespace`) share no prefixes, so that the time to the first token does not reveal the
    prompts of other clients.
    """

    def __init__(self, device: torch.device, *, keep: bool = True, windows: Windows | None = None) -> None:
        """`keep=False` disables the cache: no prefix is kept or found. `windows`: places of the slots in layers with a
        window; None if these layers keep all slots."""
        self._windows, self._window = windows, 0 if windows is None else windows.size
        self.num_evictable = 0  # slots that `evict` could return now
        self._keep = keep
        self._nothing = torch.empty(0, dtype=torch.int64, device=device)
        self._roots: dict[tuple[str, int], Node] = {}
        self._now = 0
        self._leaves: set[Node] = set()  # all evictable nodes, and some that no longer are

    def acquire(self, namespace: str, tokens: list[int]) -> PrefixLease:
        """Lease the longest cached prefix of these tokens, without the last token."""
        if not self._keep:
            return PrefixLease(Node([], self._nothing, None), 0, self._nothing)
        key = namespace, tokens[0]
        root = self._roots.setdefault(key, Node([], self._nothing, None, key))
        node, known = self._descend(root, tokens, 0)
        self._now += 1
        for above in node.upwards():
            above.last_used = self._now
        path = self._usable([(above, len(above.labels)) for above in node.upwards()][::-1])
        for above, _ in path:
            self.num_evictable -= 0 if above.leases else len(above.labels)
            above.leases += 1
        root.leases += 1
        node, length = path[-1][0] if path else root, sum(common for _, common in path)
        self._see(node)
        slots = torch.cat([above.slots for above, _ in path]) if path else self._nothing
        return PrefixLease(node, length, slots, placed_from=length, parting=known if length < known else 0)

    def known(self, namespace: str, tokens: list[int]) -> int:
        """Number of positions that `acquire` would lease for these tokens now."""
        return sum(common for _, common in self._usable([*self._path(namespace, tokens)]))

    def leased(self, namespace: str, tokens: list[int], *, excluding: Sequence[PrefixLease] = ()) -> int:
        """Number of the `known` positions that are held by leases other than `excluding`."""
        mine, path = _holds(excluding), self._usable([*self._path(namespace, tokens)])
        return sum(common for node, common in path if node.leases > mine[node])

    def _usable(self, path: list[tuple[Node, int]]) -> list[tuple[Node, int]]:
        """Shorten a path of nodes and matching labels to the last end before which a whole window is placed."""
        length = unplaced = usable = 0
        for number, (node, common) in enumerate(path, 1):
            unplaced = length + min(node.placed_from, common) if node.placed_from else unplaced
            length += common
            usable = number if unplaced == 0 or length - unplaced >= self._window else usable
        return path[:usable]

    def _see(self, node: Node) -> None:
        """Note that the window before the end of this node is needed."""
        left = self._window
        for above in node.upwards() if left else ():
            above.last_seen = self._now
            left -= len(above.labels)
            if left <= 0:
                break

    def publish(self, lease: PrefixLease, tokens: list[int], slots: Tensor) -> None:
        """Add the slots that a running sequence has computed after its leased prefix, and extend the lease over them.
        Does nothing if another sequence has published the same tokens meanwhile. # slots [positions] int64"""
        labels = list(tokens[lease.length + 1 :][: slots.shape[0]]) if self._keep else []
        # A running sequence cannot replace its slots by those that another one has published.
        if labels and labels[0] not in lease.node.children:
            lease.node = self._attach(lease.node, labels, slots, lease.placed_from - lease.length)
            lease.node.leases = 1
            lease.length += len(labels)
            lease.placed_from, lease.parting = max(lease.placed_from, lease.length), 0

    def release(self, lease: PrefixLease, tokens: list[int], slots: Tensor) -> Tensor:
        """End a lease, and cache the slots of the positions after it. Returns the slots that the caller must free,
        because the cache has these tokens already or does not keep any. # slots [positions] int64 -> [freed] int64"""
        if not self._keep:
            self._take(slots[lease.placed_from :])
            return slots
        self._now += 1
        text = tokens[: lease.length + slots.shape[0] + 1]
        node, length = self._descend(lease.node, text, lease.length)
        labels = list(text[length + 1 :])
        self._hand_over(lease, node, length, slots)
        twice, left = slots[: length - lease.length], slots[length - lease.length + len(labels) :]
        if labels:
            node = self._attach(node, labels, slots[len(twice) :], lease.placed_from - length)
            self.num_evictable += len(labels)
        for above in node.upwards():
            above.last_used = self._now
        self._unlock(lease.node)
        self._note(node)
        self._take(left[max(0, lease.placed_from - length - len(labels)) :])
        return torch.cat([twice, left])

    def clear_places(self, wanted: int, running: Sequence[Running]) -> None:
        """Take places until `wanted` are free, or until running sequences see all that are left."""
        assert self._windows is not None, "all slots keep their places"
        for one in running:
            self.pass_unseen(one)
        places = self._windows.places
        if wanted > places.num_free:
            firsts = [(lease, computed - self._window + 1) for lease, computed, _, _ in running]
            self.reclaim(max(wanted - places.num_free, places.capacity // _SHARE_AT_ONCE), firsts)
        for one in running:
            if wanted > places.num_free:
                one[0].parting = 0  # the cache does without it
                self.pass_unseen(one)

    def pass_unseen(self, running: Running) -> None:
        """Take the places of a running sequence's positions that no window reaches any more. The window that the cache
        is to get is kept until none of its places is seen, and handed over then."""
        lease, computed, tokens, slots = running
        first = computed - self._window + 1
        if 0 < lease.parting <= first:
            node, length = self._descend(lease.node, tokens[: lease.parting + 1], lease.length)
            self._hand_over(lease, node, length, slots[lease.length :])
            lease.parting = 0
        elif lease.parting:
            first = min(first, lease.parting - self._window)
        if first > lease.placed_from:
            self._take(slots[lease.placed_from : first])
            lease.placed_from = first

    def reclaim(self, count: int, running: Sequence[tuple[PrefixLease, int]]) -> None:
        """Take `count` places of cached slots, or as many as there are: first those in the middle of nodes, then the
        windows before their ends, least recently needed first. `running`: leases, and the first position of each that
        its sequence still sees."""
        floors: dict[Node, int] = {}  # label of a node from which on running sequences see its slots
        for lease, first in running:
            end = lease.length
            for node in lease.node.upwards():
                if end <= first:
                    break
                end -= len(node.labels)
                floors[node] = min(floors.get(node, len(node.labels)), max(0, first - end))
        nodes = sorted(reversed(list(self._nodes())), key=lambda node: node.last_seen)  # of equal ones the deeper first
        for kept in (self._window, 0):
            for node in nodes:
                until = min(floors.get(node, len(node.labels)), len(node.labels) - kept)
                if count > 0 and until > node.placed_from:
                    self._take(node.slots[node.placed_from : until])
                    count -= until - node.placed_from
                    node.placed_from = until

    def _hand_over(self, lease: PrefixLease, node: Node, length: int, slots: Tensor) -> None:
        """Give places of slots that were computed twice, from the lease's end to `length`, to those of the nodes below
        the leased one down to `node`, if they join a window before a node's end; take the others. # slots of positions
        from the lease's end on"""
        if self._windows is None or length == lease.length:
            return
        end = length
        for above in takewhile(lambda above: above is not lease.node, node.upwards()):
            size, start = len(above.labels), end - len(above.labels)
            own, placed = slots[start - lease.length : end - lease.length], min(max(0, lease.placed_from - start), size)
            gap = slice(min(above.placed_from, max(placed, size - self._window)), above.placed_from)
            self._windows.hand_over(own[gap], above.slots[gap])
            self._take(torch.cat([own[placed : gap.start], own[max(placed, gap.stop) :]]))
            above.placed_from, end = gap.start, start
        lease.placed_from = max(lease.placed_from, length)
        self._see(node)

    def _take(self, slots: Tensor) -> None:
        """Take the places of slots, which all have one. # [count]"""
        if self._windows is not None and len(slots):
            self._windows.take(slots)

    def evict(self, count: int) -> Tensor:
        """Evict `count` slots, least recently used first, or all evictable ones if there are fewer.
        # -> [evicted] int64"""
        given = [self._nothing]
        oldest = [(leaf.last_used, id(leaf), leaf) for leaf in self._leaves if leaf.is_evictable]
        heapq.heapify(oldest)
        while count > 0 and oldest:
            leaf = heapq.heappop(oldest)[2]
            kept = max(0, len(leaf.labels) - count)  # cut from the end, which is shared by the fewest prompts
            given.append(leaf.slots[kept:])
            count -= len(leaf.labels) - kept
            rest = self._shorten(leaf, kept)
            if rest.is_evictable:
                heapq.heappush(oldest, (rest.last_used, id(rest), rest))
        self._leaves = {leaf for _, _, leaf in oldest}
        return torch.cat(given)

    def held_only_by(self, leases: Sequence[PrefixLease]) -> int:
        """Number of positions that become evictable when all of these leases end."""
        return sum(len(node.labels) for node, count in _holds(leases).items() if node.leases == count)

    def worth_waiting_for(self, namespace: str, tokens: list[int]) -> int | None:
        """Minimum length in tokens of a common prefix with a prefilling sequence, from which on waiting for that
        sequence beats computing the prefix again. Returns None if the prompt is too short for waiting to pay."""
        length = self.known(namespace, tokens) + _WORTH_WAITING + 1
        return length if self._keep and length <= len(tokens) else None

    def held(self, *, placed: bool = False) -> Tensor:
        """Collect all slots that belong to the cache, or those that are placed. # -> [held] int64"""
        return torch.cat([self._nothing, *(node.slots[node.placed_from if placed else 0 :] for node in self._nodes())])

    def _nodes(self) -> Iterator[Node]:
        """Iterate over all nodes, each before its children."""
        nodes = list(self._roots.values())
        while nodes:
            node = nodes.pop()
            yield node
            nodes += node.children.values()

    def _path(self, namespace: str, tokens: list[int]) -> Iterator[tuple[Node, int]]:
        """Iterate over the nodes along these tokens, each with the number of its labels that match."""
        node, length = self._roots.get((namespace, tokens[0])), 0
        while node is not None and length + 1 < len(tokens):
            child = node.children.get(tokens[length + 1])
            if child is None:
                return
            common = _common(child.labels, tokens, length + 1)
            yield child, common
            length += common
            node = child if common == len(child.labels) else None

    def _descend(self, node: Node, tokens: list[int], length: int) -> tuple[Node, int]:
        """Find the deepest node along these tokens, and split it if they match only a part of its labels. Returns the
        node and the number of positions cached up to its end."""
        while length + 1 < len(tokens) and (child := node.children.get(tokens[length + 1])) is not None:
            common = _common(child.labels, tokens, length + 1)
            node = self._split(child, common) if common < len(child.labels) else child
            length += common
            if node is not child:
                break
        return node, length

    def _split(self, node: Node, place: int) -> Node:
        """Split off a new parent with the first `place` labels, and return it; leases keep pointing at `node`."""
        assert node.parent is not None, "a root has no labels"
        upper = Node(node.labels[:place], node.slots[:place], node.parent)
        upper.leases, upper.last_used, upper.last_seen = node.leases, node.last_used, node.last_seen
        upper.placed_from, node.placed_from = min(node.placed_from, place), max(0, node.placed_from - place)
        node.parent.children[upper.labels[0]] = upper
        node.labels, node.slots, node.parent = node.labels[place:], node.slots[place:], upper
        upper.children[node.labels[0]] = node
        return upper

    def _attach(self, node: Node, labels: list[int], slots: Tensor, placed_from: int) -> Node:
        own, placed_from = slots[: len(labels)].clone(), min(max(0, placed_from), len(labels))
        child = node.children[labels[0]] = Node(labels, own, node, last_used=self._now, placed_from=placed_from)
        self._see(child)
        return child

    def _unlock(self, node: Node) -> None:
        lowest = node
        for above in lowest.upwards():
            above.leases -= 1
            self.num_evictable += 0 if above.leases else len(above.labels)
            node = above
        root = node.parent or node
        root.leases -= 1
        self._note(lowest)
        self._forget_if_bare(root)

    def _note(self, node: Node) -> None:
        if node.is_evictable:
            self._leaves.add(node)

    def _shorten(self, leaf: Node, length: int) -> Node:
        """Cut a leaf to `length` labels. Returns the leaf, or its parent if no label is left."""
        self.num_evictable -= len(leaf.labels) - length
        self._take(leaf.slots[max(length, leaf.placed_from) :])
        leaf.placed_from = min(length, leaf.placed_from)
        if length:
            leaf.labels, leaf.slots = leaf.labels[:length], leaf.slots[:length]
            return leaf
        parent, leaf.parent = leaf.parent, None
        assert parent is not None, "a root has nothing to evict"
        del parent.children[leaf.labels[0]]
        self._forget_if_bare(parent)
        return parent

    def _forget_if_bare(self, root: Node) -> None:
        if root.key is not None and not root.children and root.leases == 0:
            del self._roots[root.key]


def _common(labels: list[int], tokens: list[int], start: int) -> int:
    """Number of leading labels that equal the tokens from `start` on."""
    least, most = 0, min(len(labels), len(tokens) - start)
    tried = most
    while least < most:  # bisection: comparing slices takes a thousandth of a loop over tokens
        if labels[least:tried] == tokens[start + least : start + tried]:
            least = tried
        else:
            most = tried - 1
        tried = (least + most + 1) // 2
    return least


def _holds(leases: Sequence[PrefixLease]) -> Counter[Node]:
    """Count how many of these leases hold each node."""
    return Counter(node for lease in leases for node in lease.node.upwards())
