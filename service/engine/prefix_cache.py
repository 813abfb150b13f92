"""The prefix cache: KV slots of computed tokens, shared by sequences with the same prefix, in a radix tree over token
ids.

The slot of position t is stored under the tokens 0..t + 1, one more than its keys and values depend on: a drafter's
entry of position t needs the next token, and the last token of a prompt is always run again for its logits. A row's
result does not depend on the other rows of its forward, so cached keys and values equal recomputed ones bit for bit.
In layers with a window, slots may lose their places (`Windows`): the cache keeps those before the ends of nodes, where
messages end and prompts part, and a prefix is found only as far as the window before its end still has its places. In
the same way recurrent layers need a snapshot of their states at the end of a prefix (`States`): running sequences leave
them where their messages end and where their prompt parts from a cached text, and the least recently needed is dropped
(`Node.needed`).
Legend: labels = tokens on the edge to a node, one per slot of the node; placed = with a place in layers with a window.
"""

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, takewhile

import torch
from torch import Tensor

from service.engine.kv_pool import Windows
from service.engine.prefix_tree import Node
from service.engine.states import NULL_STATE, States

_SHARE_AT_ONCE = 32  # of so many places one is taken at least, so that few steps take any

_WORTH_WAITING = 64
"""Minimum number of tokens that another sequence is about to compute, for waiting to beat computing them again."""

_WORTH_A_STATE = 16
"""Minimum number of tokens between two snapshots of a text, except at the end of its messages."""

_MOST_HELD = 2  # snapshots of a running sequence that are not published, where the cache has its text without any


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
    state: int = NULL_STATE  # states from which the sequence goes on
    ends: set[int] = field(default_factory=set)  # numbers of positions after which the cache wants a snapshot
    states: dict[int, int] = field(default_factory=dict)  # snapshots for the cache, by their numbers of positions
    last_state: int = 0  # positions before the last snapshot
    messages_end: int = 0  # position after which another prompt may go on; 0 if unknown
    num_tokens: int = 0  # number of the sequence's tokens when the lease was acquired


Running = tuple[PrefixLease, int, list[int], Tensor]
"""A running sequence: its lease, number of computed positions, tokens, and row of the slot table."""


class PrefixCache:
    """Keeps the slots of running and ended sequences for reuse, until they are evicted.

    Namespaces (`Scope.cache_namespace`) share no prefixes, so that the time to the first token does not reveal the
    prompts of other clients.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        keep: bool = True,
        windows: Windows | None = None,
        states: States | None = None,
    ) -> None:
        """`keep=False` disables the cache: no prefix is kept or found. `windows`: places of the slots in layers with a
        window; None if these layers keep all slots. `states`: of recurrent layers; None if there are none."""
        self._keep = keep and (states is None or bool(states.snapshots))  # without any, no prefix would be found
        self._states = states if self._keep else None
        self._windows, self._window = windows, 0 if windows is None else windows.size
        self.num_evictable = 0  # slots that `evict` could return now
        self._nothing = torch.empty(0, dtype=torch.int64, device=device)
        self._roots: dict[tuple[str, int], Node] = {}
        self._now = self._dropped = 0  # `_dropped`: when the last dropped snapshot was needed
        self._leaves: set[Node] = set()  # all evictable nodes, and some that no longer are

    def acquire(self, namespace: str, tokens: list[int], messages_end: int | None = None) -> PrefixLease:
        """Lease the longest cached prefix of these tokens, without the last token. `messages_end`: number of tokens up
        to the end of the messages, after which another prompt may go on."""
        if not self._keep:
            return PrefixLease(Node([], self._nothing, None), 0, self._nothing)
        key = namespace, tokens[0]
        root = self._roots.setdefault(key, Node([], self._nothing, None, key))
        node, known = root.descend(tokens)
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
        node.needed = self._now if node.is_shared else node.needed
        node.is_shared = node.state is not None
        slots = torch.cat([above.slots for above, _ in path]) if path else self._nothing
        lease = PrefixLease(node, length, slots, placed_from=length, state=node.state or NULL_STATE, last_state=length)
        lease.parting = known if self._windows and length < known else 0
        lease.messages_end, lease.num_tokens = min(messages_end or 0, len(tokens) - 1), len(tokens)
        self.want_state(lease, known)
        self.want_state(lease, lease.messages_end, least=1)
        return lease

    def known(self, namespace: str, tokens: list[int]) -> int:
        """Number of positions that `acquire` would lease for these tokens now."""
        return sum(common for _, common in self._usable(self._path(namespace, tokens)))

    def leased(self, namespace: str, tokens: list[int], *, excluding: Sequence[PrefixLease] = ()) -> int:
        """Number of the `known` positions that are held by leases other than `excluding`."""
        mine, path = _holds(excluding), self._usable(self._path(namespace, tokens))
        return sum(common for node, common in path if node.leases > mine[node])

    def _usable(self, path: list[tuple[Node, int]]) -> list[tuple[Node, int]]:
        """Shorten a path of nodes and matching labels to the last end before which a whole window is placed, and where
        recurrent layers have a state."""
        length = unplaced = usable = 0
        for number, (node, common) in enumerate(path, 1):
            unplaced = length + min(node.placed_from, common) if node.placed_from else unplaced
            length += common
            stands = self._states is None or (node.state is not None and common == len(node.labels))
            usable = number if stands and (unplaced == 0 or length - unplaced >= self._window) else usable
        return path[:usable]

    def _path(self, namespace: str, tokens: list[int]) -> list[tuple[Node, int]]:
        root = self._roots.get((namespace, tokens[0]))
        return [] if root is None else [*root.path(tokens)]

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
            node, length = lease.node, lease.length
            lease.node = self._attach(node, labels, slots[: len(labels)], lease.placed_from - length)
            lease.node.leases = 1
            lease.length += len(labels)
            lease.placed_from, lease.parting = max(lease.placed_from, lease.length), 0
            self._give_states(lease, node, length, tokens)
        elif labels:
            self._give_states(lease, lease.node, lease.length, tokens)

    def release(self, lease: PrefixLease, tokens: list[int], slots: Tensor) -> Tensor:
        """End a lease, and cache the slots of the positions after it. Returns the slots that the caller must free,
        because the cache has these tokens already or does not keep any. # slots [positions] int64 -> [freed] int64"""
        if not self._keep:
            self._take(slots[lease.placed_from :])
            return slots
        self._now += 1
        text = tokens[: lease.length + slots.shape[0] + 1]
        node, length = lease.node.descend(text, lease.length)
        labels = list(text[length + 1 :])
        self._hand_over(lease, node, length, slots)
        twice, left = slots[: length - lease.length], slots[length - lease.length + len(labels) :]
        if labels:
            node = self._attach(node, labels, slots[len(twice) :], lease.placed_from - length)
            self.num_evictable += len(labels)
        for above in node.upwards():
            above.last_used = self._now
        self._give_states(lease, lease.node, lease.length, tokens)
        if self._states is not None:
            self._states.free += lease.states.values()  # of texts that failed, after their last token
        self._unlock(lease.node)
        self._note(node)
        self._take(left[max(0, lease.placed_from - length - len(labels)) :])
        return torch.cat([twice, left])

    def want_state(self, lease: PrefixLease, position: int, *, least: int = _WORTH_A_STATE) -> None:
        """Let a running sequence leave a snapshot when it has computed so many positions, if that is `least` more than
        at the snapshot before."""
        before = max([lease.last_state, *(end for end in lease.ends if end <= position)])
        if self._states is not None and position - before >= least:
            lease.ends.add(position)

    def keep_state(self, lease: PrefixLease, row: int, *, is_last: bool = False) -> None:
        """Take a snapshot of the states of a running sequence in this row of the slot table, unless running sequences
        begin from all of them. `is_last`: whether the sequence stops, and has left no snapshot for some time."""
        if self._states is None:
            return
        position = self._states.position(row)
        if is_last and position - lease.last_state < _WORTH_A_STATE:
            return
        lease.ends.discard(position)
        if not self._states.free:
            used = self._states.in_use
            held = [node for node in self._nodes() if node.state is not None and node.state not in used]
            if held:
                oldest = min(reversed(held), key=lambda node: node.needed)  # of equal ones the deepest
                self._dropped = oldest.needed
                self._drop_state(oldest)
        if self._states.free:
            lease.states[position], lease.last_state = self._states.keep(row), position
        if len(lease.states) > _MOST_HELD:
            self._states.free.append(lease.states.pop(min(lease.states)))

    def _give_states(self, lease: PrefixLease, node: Node, length: int, tokens: list[int]) -> None:
        """Give a running sequence's snapshots to the nodes of its text below `node`, which ends at `length`, as far as
        the cache has that text; drop those that it has already. What follows an answer may go on from the end of the
        messages instead, so snapshots at ends of answers are dropped when half as old as others."""
        for position in [*lease.states]:
            found, end = node.descend(tokens[: position + 1], length)
            if end == position and found.state is None:
                found.state, answered = lease.states.pop(position), position >= lease.num_tokens
                found.needed = (self._dropped + self._now) // 2 if answered else self._now
                found.is_shared = not answered and position != lease.messages_end
                self._see(found)
            elif end == position and self._states is not None:
                self._states.free.append(lease.states.pop(position))

    def _drop_state(self, node: Node) -> None:
        if self._states is not None and node.state is not None:
            self._states.free.append(node.state)
            node.state, node.needed = None, 0

    def held_states(self, leases: Sequence[PrefixLease]) -> list[int]:
        """List the snapshots that belong to the cache, and those that these leases have for it."""
        held = [node.state for node in self._nodes() if node.state is not None]
        return [*held, *chain.from_iterable(lease.states.values() for lease in leases)]

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
            node, length = lease.node.descend(tokens[: lease.parting + 1], lease.length)
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
        """Evict `count` slots, or all evictable ones if there are fewer: with recurrent layers first those behind the
        last snapshot of a text, where no prefix ends, then the least recently used. # -> [evicted] int64"""
        given = [self._nothing]
        oldest = [leaf.order for leaf in self._leaves if leaf.is_evictable]
        heapq.heapify(oldest)
        while count > 0 and oldest:
            leaf = heapq.heappop(oldest)[-1]
            kept = max(0, len(leaf.labels) - count)  # cut from the end, which is shared by the fewest prompts
            given.append(leaf.slots[kept:])
            count -= len(leaf.labels) - kept
            rest = self._shorten(leaf, kept)
            if rest.is_evictable:
                heapq.heappush(oldest, rest.order)
        self._leaves = {leaf for *_, leaf in oldest}
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
        self._drop_state(leaf)
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


def _holds(leases: Sequence[PrefixLease]) -> Counter[Node]:
    """Count how many of these leases hold each node."""
    return Counter(node for lease in leases for node in lease.node.upwards())
