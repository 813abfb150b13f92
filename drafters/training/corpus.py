"""A target's answers with its tapped features and output distributions, as shards on disk that training reads.

One shard is one safetensors file of sequences laid end to end. Legend: sequences; tokens = positions of all sequences;
labels = predicted positions of all sequences: a response of n tokens has n + 1, the last for the token after its end;
responses = response tokens of all sequences; branches = alternative tokens of the target at each of them.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters.files import replacing

TOP = 64
"""How many of the target's likeliest tokens a label keeps."""

_LABEL_RANKS = 8
_LABEL_WEIGHT = 0.5
"""Alternative tokens count too, or a small corpus would leave out common words by chance."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The content of one shard."""

    tokens: Tensor  # [tokens] int32
    features: Tensor  # [tokens, taps * hidden] bfloat16, tapped target layers
    lengths: Tensor  # [sequences] int64, prompt and response
    prompts: Tensor  # [sequences] int64, prompt tokens
    temps: Tensor  # [sequences] float32, the response's temperature
    top_ids: Tensor  # [labels, TOP] int32, the target's likeliest tokens
    top_logprobs: Tensor  # [labels, TOP] float16
    branch_ids: Tensor | None = None  # [responses, branches, TOP] int32, likeliest tokens after each branch
    branch_logprobs: Tensor | None = None  # [responses, branches, TOP] float16

    @property
    def num_branches(self) -> int:
        """Branches per response token."""
        return 0 if self.branch_ids is None else self.branch_ids.shape[1]

    def save(self, path: Path) -> None:
        """Write the shard; an interrupted run leaves no partial one. Raises OSError."""
        values = {name: getattr(self, name) for name in self.__slots__}
        with replacing(path) as unfinished:
            save_file({name: value for name, value in values.items() if value is not None}, unfinished)

    @staticmethod
    def load(path: Path) -> "Shard":
        """Read a shard, memory-mapped."""
        return Shard(**load_file(path))


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence."""

    tokens: Tensor  # [length] int64
    features: Tensor  # [length, taps * hidden]
    prompt: int
    top_ids: Tensor  # [length - prompt + 1, TOP]
    top_logprobs: Tensor  # [length - prompt + 1, TOP]
    temperature: float = 0.0  # of the response
    branch_ids: Tensor = field(default_factory=lambda: torch.zeros(0, 0, TOP))  # [length - prompt, branches, TOP]
    branch_logprobs: Tensor = field(default_factory=lambda: torch.zeros(0, 0, TOP))  # [length - prompt, branches, TOP]
    seed: int | None = None  # of the sampling noise; None: unknown
    start: int = 0  # absolute position of the first token

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return self.tokens.shape[0]

    @property
    def num_branches(self) -> int:
        """Branches per response token."""
        return self.branch_ids.shape[1]

    @property
    def response(self) -> Tensor:
        """The response's tokens on the device of the labels; served examples have their tokens on the host.
        # -> [length - prompt] int64"""
        return self.tokens[self.prompt :].to(self.top_ids.device)

    def first(self, length: int) -> "Example":
        """Return the example cut to its first `length` tokens, with features and labels cut to match."""
        labels = length - self.prompt + 1
        return replace(
            self,
            tokens=self.tokens[:length],
            features=self.features[:length],
            top_ids=self.top_ids[:labels],
            top_logprobs=self.top_logprobs[:labels],
            branch_ids=self.branch_ids[: labels - 1],
            branch_logprobs=self.branch_logprobs[: labels - 1],
        )

    def within(self, length: int) -> "Example":
        """Return at most so many tokens of it: first the prompt loses its beginning, then the response its end."""
        left_out = min(self.prompt - 1, max(0, self.length - length))
        seen = self.tokens[left_out:], self.features[left_out:]
        start, prompt = self.start + left_out, self.prompt - left_out
        rest = replace(self, tokens=seen[0], features=seen[1], prompt=prompt, start=start)
        return rest.first(min(rest.length, length))

    @property
    def prompt_digest(self) -> bytes:
        """A digest of the prompt."""
        return hashlib.sha256(self.tokens[: self.prompt].numpy().tobytes()).digest()


def likeliest_others(top_ids: Tensor, response: Tensor, count: int) -> Tensor:
    """Return the ranks of the likeliest tokens other than the response's. # top_ids [responses, TOP], response
    [responses] -> [responses, count] int64"""
    return (top_ids == response[:, None]).byte().argsort(dim=1, stable=True)[:, :count]


def load_examples(paths: Sequence[Path], *, max_length: int) -> list[Example]:
    """Return the sequences of some shards, memory-mapped, each cut to `max_length` tokens."""
    examples = []
    for shard in map(Shard.load, paths):
        token, label, first = 0, 0, 0
        sequences = zip(shard.lengths.tolist(), shard.prompts.tolist(), shard.temps.tolist(), strict=True)
        for length, prompt, temperature in sequences:
            mine, labelled = slice(token, token + length), slice(label, label + length - prompt + 1)
            if length > prompt:
                tops = shard.top_ids[labelled], shard.top_logprobs[labelled]
                whole = Example(shard.tokens[mine].long(), shard.features[mine], prompt, *tops, temperature)
                if shard.branch_ids is not None and shard.branch_logprobs is not None:
                    own = slice(first, first + length - prompt)
                    ids, logprobs = shard.branch_ids[own], shard.branch_logprobs[own]
                    whole = replace(whole, branch_ids=ids, branch_logprobs=logprobs)
                examples.append(whole.within(max_length))
            token, label, first = mine.stop, labelled.stop, first + length - prompt
    return examples


def held_out(examples: list[Example], *, share: float, most: int) -> tuple[list[Example], list[Example]]:
    """Split examples into training and held-out ones, by prompt and independent of their order."""
    digests = [example.prompt_digest for example in examples]
    prompts = sorted(set(digests))
    kept = set(prompts[: max(1, min(most, int(share * len(prompts))))])
    apart = [example for example, digest in zip(examples, digests, strict=True) if digest in kept]
    return [example for example, digest in zip(examples, digests, strict=True) if digest not in kept], apart


class Branches(NamedTuple):
    """The target's alternative tokens by position; all [batch, length, branches]."""

    labels: Tensor  # int64, label of the position after, -1 where there is no branch
    tokens: Tensor  # int64
    odds: Tensor  # float32


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences side by side, padded to the longest."""

    tokens: Tensor  # [batch, length] int64, 0 padded
    features: Tensor  # [batch, length, taps * hidden]
    label_index: Tensor  # [batch, length + block] int64, the label of each position, -1 where there is none
    top_ids: Tensor  # [labels, TOP] int64, first those of positions, then those of branches
    top_logprobs: Tensor  # [labels, TOP] float32
    passed: Tensor  # [batch, length + reach] float32, log-probability of the response up to each position
    branches: Branches
    num_tokens: int

    @staticmethod
    def of(examples: list[Example], reach: int, device: torch.device | str) -> "Batch":
        """Join examples; up to `reach` positions past the end may be indexed, and have no label."""
        longest = max(example.length for example in examples)
        tokens = torch.zeros(len(examples), longest, dtype=torch.int64)
        features = torch.zeros(len(examples), longest, examples[0].features.shape[1], dtype=examples[0].features.dtype)
        label_index = torch.full((len(examples), longest + reach), -1)
        passed = torch.zeros(len(examples), longest + reach)
        base = 0
        for index, example in enumerate(examples):
            tokens[index, : example.length] = example.tokens
            features[index, : example.length] = example.features
            labels = example.top_ids.shape[0]
            label_index[index, example.prompt : example.prompt + labels] = torch.arange(base, base + labels)
            base += labels
            passed[index, example.prompt : example.length] = _response_logprobs(example).cumsum(0)
        branched = [e for e in examples if e.num_branches]
        ids = [e.top_ids for e in examples] + [e.branch_ids.flatten(0, 1) for e in branched]
        logprobs = [e.top_logprobs for e in examples] + [e.branch_logprobs.flatten(0, 1) for e in branched]
        return Batch(
            tokens=tokens.to(device),
            features=features.to(device),
            label_index=label_index.to(device),
            top_ids=torch.cat(ids).long().to(device),
            top_logprobs=torch.cat([values.float() for values in logprobs]).to(device),
            passed=passed.to(device),
            branches=Branches(*(values.to(device) for values in _branches(examples, longest, first_label=base))),
            num_tokens=sum(e.length for e in examples),
        )


def _response_logprobs(example: Example) -> Tensor:
    """Return the log-probabilities of the response's tokens, at most the least of the likeliest ones. # ->
    [response]"""
    response = example.response
    found = example.top_ids[: len(response)] == response[:, None]
    rank = torch.where(found.any(1), found.byte().argmax(1), found.shape[1] - 1)
    return example.top_logprobs[: len(response)].float().gather(1, rank[:, None])[:, 0]


def _branches(examples: Sequence[Example], longest: int, *, first_label: int) -> Branches:
    """Return the branches of a batch, with labels that count up from the first."""
    shape = len(examples), longest, examples[0].num_branches
    labels, tokens, odds = torch.full(shape, -1), torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
    for index, example in enumerate(examples):
        response, count = slice(example.prompt, example.length), example.length - example.prompt
        ranks = likeliest_others(example.top_ids[:count], example.response, example.num_branches)
        labels[index, response] = torch.arange(first_label, first_label + ranks.numel()).view(ranks.shape)
        tokens[index, response] = example.top_ids[:count].long().gather(1, ranks)
        odds[index, response] = example.top_logprobs[:count].float().gather(1, ranks).exp()
        first_label += ranks.numel()
    return Branches(labels, tokens, odds)


def by_length(lengths: Sequence[int], most_tokens: int) -> Iterator[list[int]]:
    """Group indices of sequences of similar length, at most so many tokens with padding; a longer sequence is alone."""
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
    """Yield all examples once in random order, in batches of similar length and about that many tokens."""
    order = torch.randperm(len(examples), generator=generator).tolist()
    window = max(1, 32 * tokens // max(1, sum(e.length for e in examples) // max(1, len(examples))))
    groups: list[list[Example]] = []
    for start in range(0, len(order), window):
        near = [examples[i] for i in order[start : start + window]]
        groups += [[near[place] for place in places] for places in by_length([e.length for e in near], tokens)]
    for place in torch.randperm(len(groups), generator=generator).tolist():
        yield groups[place]


def rarest_token(examples: Sequence[Example], *, vocab_size: int) -> int:
    """Return the last of the target's tokens that texts hold least, most often not at all."""
    counts = torch.cat([example.tokens for example in examples]).long().bincount(minlength=vocab_size)
    return int((counts == counts.min()).nonzero()[-1])


def frequent_tokens(examples: Sequence[Example], *, vocab_size: int, size: int) -> Tensor:
    """Return the `size` tokens with the largest expected frequency in responses and labels, ascending. # -> [size]
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
    """Training cannot start or continue; the message says what to change."""
