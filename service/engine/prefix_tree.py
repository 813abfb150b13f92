"""A radix tree over token ids, whose nodes hold the slots of runs of tokens.

Legend: labels = tokens on the edge to a node, one per slot of the node; placed = with a place in layers with a window.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor


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
    state: int | None = None  # snapshot of the states that have read the text up to its end
    needed: int = 0  # counter of the cache's calls when the snapshot was left, or last needed if shared; 0 without one
    is_shared: bool = False  # whether several texts go on from the snapshot; a text that went on needs it no more

    @property
    def is_evictable(self) -> bool:
        """Whether neither a lease nor a longer cached prefix needs this node."""
        return self.leases == 0 and not self.children and self.parent is not None

    @property
    def order(self) -> tuple[int, int, int, "Node"]:
        """Sort key among leaves: the smallest is evicted first."""
        return self.needed, self.last_used, id(self), self

    def upwards(self) -> Iterator["Node"]:
        """Iterate over this node and its ancestors, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def path(self, tokens: list[int]) -> Iterator[tuple["Node", int]]:
        """Iterate over the nodes along these tokens below this root, each with the number of its labels that match."""
        node, length = self, 0
        while length + 1 < len(tokens) and (child := node.children.get(tokens[length + 1])) is not None:
            common = common_length(child.labels, tokens, length + 1)
            yield child, common
            length += common
            if common < len(child.labels):
                return
            node = child

    def descend(self, tokens: list[int], length: int = 0) -> tuple["Node", int]:
        """Find the deepest node along these tokens, and split it if they match only a part of its labels. `length`:
        number of positions up to this node's end. Returns the node, and this number for it."""
        node = self
        while length + 1 < len(tokens) and (child := node.children.get(tokens[length + 1])) is not None:
            common = common_length(child.labels, tokens, length + 1)
            node = child.split(common) if common < len(child.labels) else child
            length += common
            if node is not child:
                break
        return node, length

    def split(self, place: int) -> "Node":
        """Split off a new parent with the first `place` labels, and return it; leases keep pointing at this node."""
        assert self.parent is not None, "a root has no labels"
        upper = Node(self.labels[:place], self.slots[:place], self.parent)
        upper.leases, upper.last_used, upper.last_seen = self.leases, self.last_used, self.last_seen
        upper.placed_from, self.placed_from = min(self.placed_from, place), max(0, self.placed_from - place)
        self.parent.children[upper.labels[0]] = upper
        self.labels, self.slots, self.parent = self.labels[place:], self.slots[place:], upper
        upper.children[self.labels[0]] = self
        return upper


def common_length(labels: list[int], tokens: list[int], start: int = 0) -> int:
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
