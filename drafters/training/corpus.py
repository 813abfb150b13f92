"""What a target answered and what its layers said meanwhile, as shards on disk that training reads.

One shard is one safetensors file of sequences laid end to end. Legend: sequences; tokens = positions of all sequences;
labels = predicted positions of all sequences: a response of n tokens has n + 1, the last is what would have come next.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

TOP = 64
"""How many of the target's likeliest tokens a label keeps."""

_LABEL_RANKS = 8
_LABEL_WEIGHT = 0.5
"""What the target might have said counts too, or a small corpus would leave out common words by chance."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The content of one file."""

    tokens: Tensor  # [tokens] int32
    features: Tensor  # [tokens, taps * hidden] bfloat16, tapped target layers
    lengths: Tensor  # [sequences] int64, prompt and response
    prompts: Tensor  # [sequences] int64, prompt tokens
    temps: Tensor  # [sequences] float32, the temperature the response was sampled at
    top_ids: Tensor  # [labels, TOP] int32, the target's likeliest tokens
    top_logprobs: Tensor  # [labels, TOP] float16

    def save(self, path: Path) -> None:
        """Write under a temporary name first, so that a broken-off run leaves no half shard."""
        part = path.with_suffix(".part")
        save_file({name: getattr(self, name) for name in self.__slots__}, part)
        part.rename(path)

    @staticmethod
    def load(path: Path) -> "Shard":
        return Shard(**load_file(path))


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence."""

    tokens: Tensor  # [length] int64
    features: Tensor  # [length, taps * hidden]
    prompt: int
    top_ids: Tensor  # [length - prompt + 1, TOP]
    top_logprobs: Tensor  # [length - prompt + 1, TOP]
    temperature: float = 0.0  # the response was sampled at

    @property
    def length(self) -> int:
        return self.tokens.shape[0]

    def first(self, length: int) -> "Example":
        """Its beginning."""
        labels = length - self.prompt + 1
        tops = self.top_ids[:labels], self.top_logprobs[:labels]
        return Example(self.tokens[:length], self.features[:length], self.prompt, *tops, self.temperature)

    @property
    def prompt_digest(self) -> bytes:
        """Equal for sequences that answer the same prompt."""
        return hashlib.sha256(self.tokens[: self.prompt].numpy().tobytes()).digest()


def load_examples(paths: Sequence[Path], *, max_length: int) -> list[Example]:
    """All sequences of some shards, memory-mapped, cut at so many tokens."""
    examples = []
    for shard in map(Shard.load, paths):
        token, label = 0, 0
        sequences = zip(shard.lengths.tolist(), shard.prompts.tolist(), shard.temps.tolist(), strict=True)
        for length, prompt, temperature in sequences:
            mine, labelled = slice(token, token + length), slice(label, label + length - prompt + 1)
            if min(length, max_length) > prompt:
                tops = shard.top_ids[labelled], shard.top_logprobs[labelled]
                whole = Example(shard.tokens[mine].long(), shard.features[mine], prompt, *tops, temperature)
                examples.append(whole.first(min(length, max_length)))
            token, label = mine.stop, labelled.stop
    return examples


def held_out(examples: list[Example], *, share: float, most: int) -> tuple[list[Example], list[Example]]:
    """Examples to train on, and those of a few prompts that are kept apart; the same ones whatever the order."""
    digests = [example.prompt_digest for example in examples]
    prompts = sorted(set(digests))
    kept = set(prompts[: max(1, min(most, int(share * len(prompts))))])
    apart = [example for example, digest in zip(examples, digests, strict=True) if digest in kept]
    return [example for example, digest in zip(examples, digests, strict=True) if digest not in kept], apart


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences side by side, padded to the longest."""

    tokens: Tensor  # [batch, length] int64, 0 padded
    features: Tensor  # [batch, length, taps * hidden]
    label_index: Tensor  # [batch, length + block] int64, the label of each position, -1 where there is none
    top_ids: Tensor  # [labels, TOP] int64
    top_logprobs: Tensor  # [labels, TOP] float32
    num_tokens: int

    @staticmethod
    def of(examples: list[Example], reach: int, device: torch.device | str) -> "Batch":
        """`reach` positions beyond the end can be asked for; they have no label."""
        longest = max(example.length for example in examples)
        tokens = torch.zeros(len(examples), longest, dtype=torch.int64)
        features = torch.zeros(len(examples), longest, examples[0].features.shape[1], dtype=examples[0].features.dtype)
        label_index = torch.full((len(examples), longest + reach), -1)
        base = 0
        for line, example in enumerate(examples):
            tokens[line, : example.length] = example.tokens
            features[line, : example.length] = example.features
            labels = example.top_ids.shape[0]
            label_index[line, example.prompt : example.prompt + labels] = torch.arange(base, base + labels)
            base += labels
        return Batch(
            tokens=tokens.to(device),
            features=features.to(device),
            label_index=label_index.to(device),
            top_ids=torch.cat([e.top_ids for e in examples]).long().to(device),
            top_logprobs=torch.cat([e.top_logprobs.float() for e in examples]).to(device),
            num_tokens=sum(e.length for e in examples),
        )


def by_length(lengths: Sequence[int], most_tokens: int) -> Iterator[list[int]]:
    """Places of texts of similar length, of at most so many tokens with padding; a longer text goes alone."""
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
    """One pass over all examples in random order, of similar length within a batch of about that many tokens."""
    order = torch.randperm(len(examples), generator=generator).tolist()
    window = max(1, 32 * tokens // max(1, sum(e.length for e in examples) // max(1, len(examples))))
    groups: list[list[Example]] = []
    for start in range(0, len(order), window):
        near = [examples[i] for i in order[start : start + window]]
        groups += [[near[place] for place in places] for places in by_length([e.length for e in near], tokens)]
    for place in torch.randperm(len(groups), generator=generator).tolist():
        yield groups[place]


def frequent_tokens(examples: Sequence[Example], *, vocab_size: int, size: int) -> Tensor:
    """The `size` tokens of largest expected frequency in responses and labels, ascending. # -> [size] int64"""
    frequency = torch.zeros(vocab_size, dtype=torch.float64)
    for example in examples:
        said = example.tokens[example.prompt :]
        likely = example.top_ids[:, :_LABEL_RANKS].flatten().long()
        largest = max(int(said.max()), int(likely.max()))
        if largest >= vocab_size:
            raise TrainingError(
                f"the features hold token {largest}, but the target has {vocab_size}: they were made for another target"
            )
        frequency.index_add_(0, said, torch.ones_like(said, dtype=torch.float64))
        odds = example.top_logprobs[:, :_LABEL_RANKS].double().exp().flatten()
        frequency.index_add_(0, likely, _LABEL_WEIGHT * odds)
    return frequency.topk(min(size, vocab_size)).indices.sort().values


class TrainingError(ValueError):
    """Training cannot start or go on; the message says what to change."""
