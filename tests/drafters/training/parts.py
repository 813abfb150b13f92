"""Small corpora and drafters for the tests of training."""

from dataclasses import replace

import torch
from torch import Tensor

from drafters.memory.drafter import MemoryDrafter
from drafters.network.model import SpecBlock
from drafters.protocol import DraftContext, DraftingSizes, MemorySizes
from drafters.trained.specblock import FusedInput
from drafters.training.corpus import TOP, Example, RecordedMemory, Shard
from drafters.tree import DraftTree
from kernels.memory import past_lines
from tests.drafters.network.parts import tiny_drafter
from tests.tiny_models import VOCAB_SIZE

BLOCK = 4
HIDDEN = 48
WIDTH = 3 * HIDDEN


def random_shard(sequences: int, *, seed: int = 0, length: int = 30) -> Shard:
    """Random texts of several lengths with features and labels as the reader writes them."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([length + number % 5 for number in range(sequences)])
    prompts = torch.tensor([6 + number % 3 for number in range(sequences)])
    tokens, labels = int(lengths.sum()), int((lengths - prompts + 1).sum())
    logits = 3 * torch.randn(labels, VOCAB_SIZE, generator=generator)
    top = logits.log_softmax(-1).topk(TOP)
    return Shard(
        tokens=torch.randint(300, (tokens,), generator=generator).to(torch.int32),
        features=torch.randn(tokens, WIDTH, generator=generator).to(torch.bfloat16),
        lengths=lengths,
        prompts=prompts,
        temps=torch.tensor([0.7 * (number % 2) for number in range(sequences)]),
        top_ids=top.indices.to(torch.int32),
        top_logprobs=top.values.to(torch.float16),
    )


def repeating_example(token: int, length: int, *, prompt: int = 5) -> Example:
    """A text of one token throughout."""
    generator = torch.Generator().manual_seed(length)
    labels = length - prompt + 1
    return Example(
        tokens=torch.full((length,), token),
        features=torch.randn(length, WIDTH, generator=generator).to(torch.bfloat16),
        prompt=prompt,
        top_ids=torch.arange(TOP).expand(labels, -1),
        top_logprobs=torch.full((labels, TOP), -5.0),
    )


def remembered(text: Example, past: list[list[int]], *, nodes: int = 8) -> Example:
    """The text, with a record of a memory that has seen these past answers."""
    drafter = MemoryDrafter(
        DraftingSizes(max_sequences=1, max_length=4096, max_nodes=16, memory=MemorySizes(num_bytes=1 << 20))
    )
    for answer in past:
        drafter.add_answer("", answer, len(answer))
    drafter.start([DraftContext(0, text.tokens[: text.prompt].tolist())])
    (answers, *_), rows, lines = drafter.past.by_scope(), torch.tensor([0]), list[Tensor]()
    regression = torch.stack([answers.weights, answers.squares])
    for token in text.tokens[text.prompt :].view(-1, 1, 1):
        lines.append(past_lines(drafter._memory, rows, token)[0])
        drafter._learn((rows, token, torch.tensor([1]), DraftTree.empty(1), token))
    before = torch.zeros(0, dtype=torch.int64)
    return replace(text, memory=RecordedMemory(before, torch.cat(lines), regression, nodes))


def trainable_drafter(seed: int = 0) -> SpecBlock:
    return tiny_drafter(seed=seed, block_size=BLOCK).requires_grad_(True)


def always_says(model: SpecBlock, token: int) -> SpecBlock:
    """The same drafter, made to propose one token everywhere and to be sure of it. `token` is a target id."""
    layer, hidden = model.input_layer, model.config.hidden_size
    assert isinstance(layer, FusedInput)
    with torch.no_grad():
        # All entries begin as the same query, which every layer passes through.
        layer.position_queries.copy_(layer.position_queries[:1].expand_as(layer.position_queries))
        layer.fuse.weight[:, : 2 * hidden] = 0.0
        for part in model.decoder.layers:
            part.get_parameter("self_attn.o_proj.weight").zero_()
            part.get_parameter("mlp.down_proj.weight").zero_()
        for shift in model.shift_proj:
            shift.get_parameter("weight").copy_(torch.eye(hidden, 2 * hidden))
        none = torch.zeros(1, hidden)
        state = model.decoder.norm(layer.blocks(none, none, slice(1)))[0, 0]
        model.lm_head.weight.zero_()
        model.lm_head.weight[model.t2d[token]] = 20.0 * state / state.square().sum()
        last = model.rank_head[2]
        last.get_parameter("weight").zero_()
        last.get_parameter("bias").copy_(torch.tensor([20.0, 0.0, 0.0, 0.0]))
    return model
