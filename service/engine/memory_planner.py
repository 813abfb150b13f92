"""Plans device memory before serving: all other uses are estimated first, the KV cache gets a share of the rest.
Nothing grows while serving. On a CPU the size of the KV cache is a setting, and that much memory must be free.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import psutil
import torch

from drafters.memory.drafter import text_buckets
from drafters.network.model import SpecBlock
from drafters.network.served import ServingNetwork
from drafters.training.initialise import sums_bytes
from drafters.tree import MAX_NODES
from kernels.memory import BUCKET_BYTES, FEATURES, ORDERS, WEIGHT_SETS
from kernels.rows import ExtendRows
from service.config import GIB
from service.engine.captured import ROWS
from service.engine.engine import EngineLimits
from service.engine.kv_pool import KVPool, KVShape
from service.engine.measuring import Trial
from service.engine.states import ONE_PROMPT, StateRoom
from service.engine.target import Target
from service.engine.weights import LoadedModel
from service.errors import StartupError

_SCORE_BYTES = 16  # sampling holds logits, noise, their sum and a mask, 4 bytes each
_HISTORY_BYTES = 1 + 4  # per sequence and vocabulary token: whether the prompt contains it, and its count
_SCORED_BLOCKS = 16  # four blocks at once, each as log-probabilities, noise, their sum, and the sum sorted
_SLOT_BYTES = 3 * 8  # a slot's number, and those of its place
_CACHED_WINDOWS = 24  # windows of slots for one cached window
_TOKENS_PER_SNAPSHOT = 2048  # slots for one snapshot of states
_LEARNING_SHARE = 0.25  # of the free memory, the most that learning takes where the operator did not ask for it
_SPARE_BYTES = 512 << 20  # workspaces of libraries, fragmentation, the device context


@dataclass(frozen=True, slots=True)
class Need:
    """A use of device memory besides the KV cache."""

    what: str
    num_bytes: int
    lower: str  # advice to an operator that lowers this need


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Free device memory, and the needs that it must cover besides the KV cache."""

    free_bytes: int
    needs: tuple[Need, ...]

    @property
    def left_bytes(self) -> int:
        """Bytes left for the KV cache. Raises StartupError if none are left."""
        left = self.free_bytes - sum(need.num_bytes for need in self.needs)
        if left <= 0:
            largest = max(self.needs, key=lambda need: need.num_bytes)
            raise StartupError(
                f"{_gib(self.free_bytes)} of device memory are free after loading the weights, but "
                f"{self.described()} are needed: {largest.lower}"
            )
        return left

    def check(self, pool_bytes: int) -> None:
        """Raise StartupError if a KV cache of this size does not fit."""
        if pool_bytes > self.left_bytes:
            raise StartupError(
                f"{_gib(pool_bytes)} for the KV cache are more than the {_gib(self.left_bytes)} of device memory "
                f"that are left after {self.described()}: lower kv_cache"
            )

    def described(self) -> str:
        """List all needs with their sizes for messages, largest first."""
        by_size = sorted(self.needs, key=lambda need: -need.num_bytes)
        return ", ".join(f"{_gib(need.num_bytes)} for {need.what}" for need in by_size)


class KVRoom(NamedTuple):
    """Numbers of slots of a KV pool, and of places in its layers with a window; None if these keep all slots. Both
    include the null slot."""

    num_slots: int
    num_places: int | None = None
    states: StateRoom = ONE_PROMPT  # of recurrent layers

    @property
    def described(self) -> str:
        """Describe the numbers for the log."""
        places = "" if self.num_places is None else f" ({self.num_places - 1} in layers with a window)"
        snapshots = "" if self.states is ONE_PROMPT else f", and {self.states.described}"
        return f"{self.num_slots - 1} tokens{places}{snapshots}"


def running_states(shape: KVShape, limits: EngineLimits) -> StateRoom:
    """Numbers of states of running sequences, and nodes of their steps: at most as many as one tree can have."""
    if not shape.bytes_per_state:
        return ONE_PROMPT
    nodes = min(limits.max_sequences * limits.max_budget, MAX_NODES)
    return StateRoom(max(limits.max_sequences, 3), max(nodes, 64))  # checks at start-up need so many


def _states_for(shape: KVShape, pool_bytes: int, limits: EngineLimits, needed: int) -> StateRoom:
    """Numbers of states that a pool of so many bytes gets: those of running sequences, and one snapshot for
    `_TOKENS_PER_SNAPSHOT` slots. `needed`: bytes of slots and places that must be left."""
    states = running_states(shape, limits)
    if not shape.bytes_per_state:
        return states
    left = pool_bytes - shape.state_bytes(states)
    beside = shape.bytes_per_state + _TOKENS_PER_SNAPSHOT * shape.bytes_per_slot
    most = min(left // beside, (left - needed) // shape.bytes_per_state)
    return states._replace(snapshots=max(0, most) if limits.prefix_cache else 0)


def room_for(shape: KVShape, pool_bytes: int, limits: EngineLimits, *, bytes_beside: int = 0) -> KVRoom:
    """Numbers of slots and places that `pool_bytes` hold; `bytes_beside`: additional bytes per slot outside of the
    pool. Layers with a window get places for the windows of all sequences and the rows of a step, and for one cached
    window to `_CACHED_WINDOWS` windows of slots, but never more places than there are slots. The states of recurrent
    layers come off first.

    Raises StartupError if one sequence of `max_model_len` tokens and its draft tree do not fit.
    """
    window, tree = shape.window or 0, MAX_NODES + 1
    needed, least = limits.max_model_len + tree, 0
    of_slot, of_place = shape.bytes_per_slot + bytes_beside, 0
    if 0 < window < limits.max_model_len:
        of_place, least = shape.bytes_in_windows, window + tree
        of_slot += _SLOT_BYTES - of_place
    states = _states_for(shape, pool_bytes, limits, needed * of_slot + least * of_place)
    states_bytes = shape.state_bytes(states)
    pool_bytes -= states_bytes
    if needed * of_slot + least * of_place > pool_bytes:
        beside = f" beside the {states.described}" if states_bytes else ""
        raise StartupError(
            f"the KV cache of {(pool_bytes + states_bytes) / GIB:.2f}GiB holds fewer than the {needed} tokens that one "
            f"sequence of max_model_len={limits.max_model_len} needs{beside}: set kv_cache to at least "
            f"{(needed * of_slot + least * of_place + states_bytes) / GIB:.2f}GiB or lower max_model_len"
            f"{' or max_sequences' if states_bytes else ''}"
        )
    if not of_place:
        return KVRoom(pool_bytes // of_slot, states=states)
    running = limits.max_sequences * (window + 1 + limits.max_budget) + limits.prefill_chunk + 1
    slots = int((pool_bytes - running * of_place) / (of_slot + of_place / _CACHED_WINDOWS))
    slots = max(slots, pool_bytes // (of_slot + of_place))  # few bytes: as many places as slots
    slots = min(max(slots, needed), (pool_bytes - least * of_place) // of_slot)
    return KVRoom(slots, min(slots, (pool_bytes - slots * of_slot) // of_place), states)


def check_free_memory(weight_bytes: int, pool_bytes: int) -> str:
    """Describe for the log how much of the machine's free memory weights and KV cache take. `weight_bytes` is 0 if the
    weights are loaded already. Raises StartupError if they take more than is free."""
    free = psutil.virtual_memory().available
    weights = f"{_gib(weight_bytes)} for weights and " if weight_bytes else ""
    if weight_bytes + pool_bytes > free:
        raise StartupError(
            f"{weights}{_gib(pool_bytes)} for the KV cache are more than the {_gib(free)} of memory that are free: "
            f"lower kv_cache{', or choose a smaller model' if weight_bytes else ''}"
        )
    return f"{weights}{_gib(pool_bytes)} for the KV cache, of {_gib(free)} that are free"


@contextmanager
def memory_for(what: str, lower: str) -> Iterator[None]:
    """Turn out-of-memory errors in this context into a StartupError that names what was allocated (`what`) and advises
    what to change (`lower`)."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise StartupError(f"the device has no memory left for {what}: {lower}") from error


def target_without_room(loaded: LoadedModel, limits: EngineLimits, tap_layers: tuple[int, ...]) -> Target:
    """Build a target whose KV pool holds one prompt chunk, for measuring memory; `give_room` replaces the pool."""
    with memory_for("a first prompt chunk", "lower prefill_chunk, or load a smaller model"):
        pool = KVPool(loaded.kv_shape, _trial_rows(limits) + 1, loaded.model.device)
        own = loaded.part, loaded.peers
        return Target(loaded.model, pool, *own, tap_layers=tap_layers, in_8_bits=loaded.in_8_bits)


def give_room(target: Target, loaded: LoadedModel, room: KVRoom) -> None:
    """Replace the target's KV pool by one of this size. Raises StartupError if memory does not suffice."""
    with memory_for(f"keys and values of {room.described}", "lower kv_cache"):
        target.pool = KVPool(
            loaded.kv_shape, room.num_slots, target.device, num_places=room.num_places, states=room.states
        )


@dataclass(frozen=True, slots=True)
class LearningSizes:
    """Sizes of the data that learning keeps on the target's device."""

    trains_here: bool  # whether training runs on this device
    window_tokens: int  # recorded tokens per text
    top: int  # recorded target tokens per position, likeliest first
    kept_texts: int  # number of finished queries kept for training and evaluation
    makes: bool = False  # whether a drafter is initialised from served queries


def needs_of(
    target: Target,
    limits: EngineLimits,
    network: ServingNetwork | None,
    learning: LearningSizes | None,
    *,
    captures: bool,
) -> tuple[Need, ...]:
    """Estimate what will still be allocated on the target's device besides the KV cache, one `Need` per use."""
    logits = limits.max_sequences * (1 + min(limits.max_budget, MAX_NODES)) * target.vocab_size
    needs = [
        Need("a step's activations", _measured(target, _trial_rows(limits)), "lower prefill_chunk"),
        Need("choosing tokens", logits * _SCORE_BYTES, "lower max_sequences or max_budget"),
        Need("penalties", limits.max_sequences * target.vocab_size * _HISTORY_BYTES, "lower max_sequences"),
        Need("what libraries keep", _SPARE_BYTES, "use a device with more memory"),
        Need("texts and past answers", _remembering_bytes(limits), "lower memory or max_sequences"),
    ]
    if captures:
        kept = ROWS[-1] * target.vocab_size * target.model.dtype.itemsize
        needs.append(Need("captured forwards", _measured(target, ROWS[-1]) + kept, "lower max_sequences or max_budget"))
    if captures and network is not None:
        needs.append(Need("the drafter's captured forwards", _growth_bytes(limits, network), "lower max_sequences"))
    if network is not None and learning is not None:
        needs += _learning_needs(limits, network, learning)
    return tuple(needs)


def _remembering_bytes(limits: EngineLimits) -> int:
    """Bytes of the memory drafter's tables: running texts and past answers."""
    texts = 2 * (limits.max_sequences + 1) * text_buckets(limits.max_model_len) * BUCKET_BYTES
    return texts + limits.memory.num_bytes


def entry_bytes(network: ServingNetwork | None) -> int:
    """Bytes that the drafter's own keys and values take per slot."""
    if network is None:
        return 0
    return network.traits.entries * _kept_bytes(network)


def _kept_bytes(network: ServingNetwork) -> int:
    """Bytes of the keys and values of one entry of the drafter."""
    attention = network.shape.attention
    return network.config.num_layers * 2 * attention.kv_heads * attention.dim * network.dtype.itemsize


def training_bytes(num_weights: int, serving_bytes: int) -> int:
    """Bytes that a learner holds on its device during an update.

    In fp32: master weights, anchor, gradients, two moments, and copies of masters and moments from which an update is
    undone. In the serving type: replica, served, staged and previous weights, and the staged ones in the kernels'
    layout.
    """
    masters, anchor, gradients, undo = (4 * num_weights for _ in range(4))
    moments = 8 * num_weights
    return masters + anchor + gradients + undo + 2 * moments + 5 * serving_bytes


def feedback_bytes(*, max_sequences: int, places: int, width: int, hidden: int, top: int, itemsize: int) -> int:
    """Bytes of the tables that record training data of running sequences."""
    per_place = (width + hidden) * itemsize + 8 * top + 8 + 8 + 4 + 1 + len(ORDERS) * BUCKET_BYTES
    return max_sequences * (places * per_place + 2 * 4 * WEIGHT_SETS * FEATURES)


def _growth_bytes(limits: EngineLimits, network: ServingNetwork) -> int:
    """Bytes for the blocks that are generated at once: their keys and values, and in fp32 their logits and noise."""
    config = network.config
    entries = config.block_size * config.blocks(1) * _SCORED_BLOCKS
    return limits.max_sequences * entries * (_kept_bytes(network) + 4 * config.draft_vocab_size)


def learning_fits(
    limits: EngineLimits,
    network: SpecBlock | ServingNetwork | None,
    learning: LearningSizes | None,
    free_bytes: int,
) -> bool:
    """Whether learning, if there is any, takes at most `_LEARNING_SHARE` of the free memory."""
    if network is None or learning is None:
        return True
    return sum(need.num_bytes for need in _learning_needs(limits, network, learning)) <= _LEARNING_SHARE * free_bytes


def _learning_needs(limits: EngineLimits, network: SpecBlock | ServingNetwork, learning: LearningSizes) -> list[Need]:
    config, itemsize = network.config, network.dtype.itemsize
    tables = feedback_bytes(
        max_sequences=limits.max_sequences + (learning.kept_texts if learning.trains_here else 0),
        places=learning.window_tokens,
        width=len(config.tap_layers) * config.hidden_size,
        hidden=config.hidden_size,
        top=learning.top,
        itemsize=itemsize,
    )
    needs = [Need("what is recorded of texts", tables, "lower max_sequences")]
    if learning.trains_here:
        with torch.device("meta"):
            weights = sum(value.numel() for value in SpecBlock(config).parameters())
        copies = training_bytes(weights, weights * itemsize)
        needs.append(Need("training", copies, "set adaptation.train_device to another device"))
        if learning.makes:
            making = sum(sums_bytes(config))
            needs.append(Need("making a drafter", making, "set adaptation.train_device to another device"))
    return needs


def _trial_rows(limits: EngineLimits) -> int:
    return min(max(limits.prefill_chunk, ROWS[-1]) + limits.max_sequences, limits.max_model_len)


@torch.inference_mode()
def _measured(target: Target, rows: int) -> int:
    """Measure the peak bytes of a forward of a prompt chunk of `rows` rows. Returns 0 on a CPU."""
    rows, device = min(rows, target.pool.num_slots - 1), target.device
    trial, extend = Trial(target, sequences=1, max_length=rows), ExtendRows(0, 0, [0] * rows, completes=True)
    placed, before = trial.place([extend]), 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    with memory_for("a step's activations", "lower prefill_chunk"):
        target.forward(placed, trial.table)
    return max(0, torch.cuda.max_memory_allocated(device) - before) if device.type == "cuda" else 0


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
