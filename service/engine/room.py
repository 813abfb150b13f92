"""How many slots a device has room for, beside everything else that serving and learning will put there.

On a CPU nothing is measured: there the pool's size is a setting. Knows no configuration.
"""

from dataclasses import dataclass

import torch

from drafters.specblock.model import HEADS, SpecBlock
from drafters.tree import MAX_NODES, DraftTree
from service.engine.build import EngineLimits, build_target
from service.engine.captured import ROWS
from service.engine.commit import lay_out
from service.engine.kv_pool import KVPool
from service.engine.memory import Need, feedback_bytes, memory_for, peak_bytes, reset_peak, total_bytes, training_bytes
from service.engine.rows import Chain
from service.engine.slots import SlotPool, SlotTable
from service.engine.target import Target
from service.engine.weights import LoadedModel

_SCORE_BYTES = 16  # sampling holds logits, noise, their sum and a mask of each, in fp32
_SCORED_BLOCKS = 16  # four begun at once, as log-probabilities, with noise, sorted, and the tree's noise itself
_SPARE_BYTES = 512 << 20  # workspaces of libraries, fragments, the context itself


@dataclass(frozen=True, slots=True)
class Learning:
    """What learning will hold on the target's device."""

    trains_here: bool
    window_tokens: int
    top: int
    kept_texts: int  # of queries that have ended, to learn from or to judge by


def target_without_room(loaded: LoadedModel, limits: EngineLimits, tap_layers: tuple[int, ...]) -> Target:
    """A target whose pool holds one prompt chunk, to measure with; it gets its own by `give_room`."""
    with memory_for("a first prompt chunk", "lower prefill_chunk, or load a smaller model"):
        return build_target(loaded, _trial_rows(limits) + 1, tap_layers=tap_layers)


def give_room(target: Target, loaded: LoadedModel, num_slots: int) -> None:
    """Replace the pool by the one to serve with. Raises StartupError."""
    with memory_for(f"keys and values of {num_slots} tokens", "lower kv_cache_gib or kv_cache_share"):
        target.pool = KVPool(loaded.kv_shape, num_slots, target.device)


def entry_bytes(network: SpecBlock | None) -> int:
    """Bytes per slot of the drafter's own keys and values."""
    if network is None:
        return 0
    config = network.config
    return config.num_layers * 2 * config.entries * network.kv_heads * network.head_dim * network.dtype.itemsize


def needs_of(
    target: Target, limits: EngineLimits, network: SpecBlock | None, learning: Learning | None, *, captures: bool
) -> tuple[Need, ...]:
    """Everything but keys and values that will still be asked of the target's device."""
    logits = _most_logits(limits) * target.vocab_size
    needs = [
        Need("a step's activations", _measured(target, _trial_rows(limits)), "lower prefill_chunk"),
        Need("choosing tokens", logits * _SCORE_BYTES, "lower max_sequences or max_budget"),
        Need("what libraries keep", _SPARE_BYTES, "use a device with more memory"),
    ]
    if captures:
        kept = ROWS[-1] * target.vocab_size * target.model.dtype.itemsize
        needs.append(Need("captured forwards", _measured(target, ROWS[-1]) + kept, "set graphs to off"))
    if captures and network is not None:
        growth = _window_bytes(limits, network) + _proposal_bytes(limits, network)
        needs.append(Need("the drafter's captured forwards", growth, "lower max_sequences"))
    if network is not None and learning is not None:
        needs += _learning_needs(limits, network, learning)
    return tuple(needs)


def _window_bytes(limits: EngineLimits, network: SpecBlock) -> int:
    """Keys and values of every sequence's window in fp32, gathered, and joined with those of the tree."""
    window = limits.max_sequences * network.config.trained_length
    return 2 * 2 * window * network.kv_heads * network.head_dim * 4


def _proposal_bytes(limits: EngineLimits, network: SpecBlock) -> int:
    """Scores of the blocks begun at once and the noise behind the roots, in fp32."""
    positions = limits.max_sequences * network.config.block_size
    return positions * _SCORED_BLOCKS * network.config.draft_vocab_size * 4


def _learning_needs(limits: EngineLimits, network: SpecBlock, learning: Learning) -> list[Need]:
    config, itemsize = network.config, network.dtype.itemsize
    tables = feedback_bytes(
        max_sequences=limits.max_sequences + (learning.kept_texts if learning.trains_here else 0),
        places=learning.window_tokens,
        width=len(config.tap_layers) * config.hidden_size,
        hidden=config.hidden_size,
        top=learning.top,
        itemsize=itemsize,
    )
    needs = [Need("what is recorded of texts", tables, "lower max_sequences or adaptation.window_tokens")]
    if learning.trains_here:
        heads = sum(value.numel() for name, value in network.named_parameters() if name.startswith(HEADS))
        weights = sum(value.numel() for value in network.parameters())
        copies = training_bytes(weights, heads, total_bytes(list(network.parameters())))
        needs.append(Need("training", copies, "set adaptation.train_device to another device"))
    return needs


def _trial_rows(limits: EngineLimits) -> int:
    return min(max(limits.prefill_chunk, ROWS[-1]) + limits.max_sequences, limits.max_model_len)


def _most_logits(limits: EngineLimits) -> int:
    return limits.max_sequences * (1 + min(limits.max_budget, MAX_NODES))


@torch.inference_mode()
def _measured(target: Target, rows: int) -> int:
    """Bytes that a chain of so many rows takes while it runs."""
    rows = min(rows, target.pool.num_slots - 1)
    table, slots = SlotTable(1, rows, target.device), SlotPool(target.pool.num_slots, target.device)
    laid_out = lay_out([Chain(0, 0, [0] * rows, completes=True)], DraftTree.empty(1, target.device), slots, table)
    before = reset_peak(target.device)
    with memory_for("a step's activations", "lower prefill_chunk"):
        target.forward(laid_out, table)
    return peak_bytes(target.device, before)
