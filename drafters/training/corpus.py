"""The training corpus: a target's answers with tapped features and output distributions, as shards on disk.

A shard is a safetensors file of concatenated sequences. Legend: sequences; tokens = positions of all sequences;
labels = predicted positions of all sequences: a response of n tokens has n + 1, the last for the token after its end.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters.files import replacing

TOP = 64
"""Number of the target's likeliest tokens that a label keeps."""

_LABEL_RANKS = 8
_LABEL_WEIGHT = 0.5
"""Weight of the labels' likely tokens in the draft vocabulary; responses alone miss common words of a small corpus."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The content of one shard: sequences with their features and labels, concatenated."""

    tokens: Tensor  # [tokens] int32
    features: Tensor  # [tokens, taps * hidden] bfloat16, tapped target layers
    lengths: Tensor  # [sequences] int64, prompt and response
    prompts: Tensor  # [sequences] int64, prompt tokens
    temps: Tensor  # [sequences] float32, the response's temperature
    top_ids: Tensor  # [labels, TOP] int32, the target's likeliest tokens
    top_logprobs: Tensor  # [labels, TOP] float16

    def save(self, path: Path) -> None:
        """Write the shard atomically. Raises OSError."""
        with replacing(path) as unfinished:
            save_file({name: getattr(self, name) for name in self.__slots__}, unfinished)

    @staticmethod
    def load(path: Path) -> "Shard":
        """Read a shard, memory-mapped. Ignores other tensors, which release 0.3.0 may have written."""
        found = load_file(path)
        return Shard(**{name: found[name] for name in Shard.__slots__})


@dataclass(frozen=True, slots=True)
class RecordedMemory:
    """What a memory drafter knew when it drafted for a text, so that its part of the drafts can be computed again."""

    before: Tensor  # [n] int64, tokens before those of the example, up to the beginning of the text
    lines: Tensor  # [length - prompt, orders, ways] int64, `kernels.memory.past_lines` of each token of the response
    regression: Tensor  # [2, sets, weights] float32, weights and squares of the memory at the beginning
    nodes: int  # mean number of nodes of the text's drafts, rounded, at least 1


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence to train on or to evaluate: tokens, features, and labels of the response."""

    tokens: Tensor  # [length] int64
    features: Tensor  # [length, taps * hidden]
    prompt: int  # number of prompt tokens
    top_ids: Tensor  # [length - prompt + 1, TOP]
    top_logprobs: Tensor  # [length - prompt + 1, TOP]
    temperature: float = 0.0  # sampling temperature of the response
    seed: int | None = None  # seed of the sampling noise; None: unknown
    start: int = 0  # absolute position of the first token
    memory: RecordedMemory | None = None  # None: no memory drafted, or it was not recorded

    @property
    def length(self) -> int:
        """Number of tokens of prompt and response."""
        return self.tokens.shape[0]

    def first(self, length: int) -> "Example":
        """Return the example cut to its first `length` tokens, with features and labels cut to match."""
        labels, memory = length - self.prompt + 1, self.memory
        return replace(
            self,
            memory=memory and replace(memory, lines=memory.lines[: length - self.prompt]),
            tokens=self.tokens[:length],
            features=self.features[:length],
            top_ids=self.top_ids[:labels],
            top_logprobs=self.top_logprobs[:labels],
        )

    def within(self, length: int) -> "Example":
        """Return the example cut to `length` tokens: first at the prompt's beginning, then at the response's end."""
        left_out = min(self.prompt - 1, max(0, self.length - length))
        seen = self.tokens[left_out:], self.features[left_out:]
        start, prompt = self.start + left_out, self.prompt - left_out
        memory = self.memory and replace(
            self.memory, before=torch.cat([self.memory.before, self.tokens[:left_out].to(self.memory.before)])
        )
        rest = replace(self, tokens=seen[0], features=seen[1], prompt=prompt, start=start, memory=memory)
        return rest.first(min(rest.length, length))

    @property
    def prompt_digest(self) -> bytes:
        """SHA-256 digest of the prompt's tokens."""
        return hashlib.sha256(self.tokens[: self.prompt].numpy().tobytes()).digest()


def load_examples(paths: Sequence[Path], *, max_length: int) -> list[Example]:
    """Return the sequences of these shards, memory-mapped and each cut to `max_length` tokens; empty responses are left
    out."""
    examples = []
    for shard in map(Shard.load, paths):
        token, label = 0, 0
        sequences = zip(shard.lengths.tolist(), shard.prompts.tolist(), shard.temps.tolist(), strict=True)
        for length, prompt, temperature in sequences:
            mine, labelled = slice(token, token + length), slice(label, label + length - prompt + 1)
            if length > prompt:
                tops = shard.top_ids[labelled], shard.top_logprobs[labelled]
                whole = Example(shard.tokens[mine].long(), shard.features[mine], prompt, *tops, temperature)
                examples.append(whole.within(max_length))
            token, label = mine.stop, labelled.stop
    return examples


def held_out(examples: list[Example], *, share: float, most: int) -> tuple[list[Example], list[Example]]:
    """Split examples into training and held-out ones by a hash of the prompt, independent of their order. Held out are
    the examples of a `share` of the prompts, at least one and at most `most`."""
    digests = [example.prompt_digest for example in examples]
    prompts = sorted(set(digests))
    kept = set(prompts[: max(1, min(most, int(share * len(prompts))))])
    apart = [example for example, digest in zip(examples, digests, strict=True) if digest in kept]
    return [example for example, digest in zip(examples, digests, strict=True) if digest not in kept], apart


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of sequences, padded to the longest, with their labels."""

    tokens: Tensor  # [batch, length] int64, 0 padded
    features: Tensor  # [batch, length, taps * hidden]
    label_index: Tensor  # [batch, length + reach] int64, row of each position's label, -1 for none
    top_ids: Tensor  # [labels, TOP] int64
    top_logprobs: Tensor  # [labels, TOP] float32
    num_tokens: int

    @staticmethod
    def of(examples: list[Example], reach: int, device: torch.device | str) -> "Batch":
        """Collate examples into a padded batch. `label_index` extends `reach` positions past the longest one, without
        labels (-1)."""
        longest = max(example.length for example in examples)
        tokens = torch.zeros(len(examples), longest, dtype=torch.int64)
        features = torch.zeros(len(examples), longest, examples[0].features.shape[1], dtype=examples[0].features.dtype)
        label_index = torch.full((len(examples), longest + reach), -1)
        base = 0
        for index, example in enumerate(examples):
            tokens[index, : example.length] = example.tokens
            features[index, : example.length] = example.features
            labels = example.top_ids.shape[0]
            label_index[index, example.prompt : example.prompt + labels] = torch.arange(base, base + labels)
            base += labels
        return Batch(
            tokens=tokens.to(device),
            features=features.to(device),
            label_index=label_index.to(device),
            top_ids=torch.cat([example.top_ids for example in examples]).long().to(device),
            top_logprobs=torch.cat([example.top_logprobs.float() for example in examples]).to(device),
            num_tokens=sum(e.length for e in examples),
        )


def by_length(lengths: Sequence[int], most_tokens: int) -> Iterator[list[int]]:
    """Yield groups of indices of sequences of similar length, each of at most `most_tokens` tokens with padding. A
    longer sequence forms a group of its own."""
    order = sorted(range(len(lengths)), key=lambda place: lengths[place])
    waiting: list[int] = []
    for place in order:
        if waiting and lengths[place] * (len(waiting) + 1) > most_tokens:
            yield waiting
            waiting = []
        waiting.append(place)
    if waiting:
        yield waiting


def batches(examples: list[Example], *, tokens: int, generator: torch.Generator) -> Iterator[list[Example]]:
    """Yield all examples once in random order, in batches of similar length with at most about `tokens` tokens."""
    order = torch.randperm(len(examples), generator=generator).tolist()
    window = max(1, 32 * tokens // max(1, sum(e.length for e in examples) // max(1, len(examples))))
    groups: list[list[Example]] = []
    for start in range(0, len(order), window):
        near = [examples[i] for i in order[start : start + window]]
        groups += [[near[place] for place in places] for places in by_length([e.length for e in near], tokens)]
    for place in torch.randperm(len(groups), generator=generator).tolist():
        yield groups[place]


def rarest_token(examples: Sequence[Example], *, vocab_size: int) -> int:
    """Return the token that occurs least often in the examples; in case of a tie the one with the largest id."""
    counts = torch.cat([example.tokens for example in examples]).long().bincount(minlength=vocab_size)
    return int((counts == counts.min()).nonzero()[-1])


def frequent_tokens(examples: Sequence[Example], *, vocab_size: int, size: int) -> Tensor:
    """Return the `size` tokens with the largest expected frequency in responses and labels, in ascending order. Raises
    TrainingError if the examples are of another target. # -> [size]
    int64"""
    frequency = torch.zeros(vocab_size, dtype=torch.float64)
    for example in examples:
        response = example.tokens[example.prompt :]
        likely = example.top_ids[:, :_LABEL_RANKS].flatten().long()
        largest = max(int(response.max()), int(likely.max()))
        if largest >= vocab_size:
            raise TrainingError(
                f"the features hold token {largest}, but the target has {vocab_size}: they were made for another target"
            )
        frequency.index_add_(0, response, torch.ones_like(response, dtype=torch.float64))
        odds = example.top_logprobs[:, :_LABEL_RANKS].double().exp().flatten()
        frequency.index_add_(0, likely, _LABEL_WEIGHT * odds)
    return frequency.topk(min(size, vocab_size)).indices.sort().values


class TrainingError(ValueError):
    """Raised if training cannot start or continue; the message gives the remedy."""
