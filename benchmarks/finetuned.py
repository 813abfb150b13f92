"""`python -m benchmarks checkpoint finetuned`: fine-tune a model for minutes, as its users would.

The base model's drafter serves the result with --drafter-path: its acceptance has fallen, and nobody has its training
data. Texts are made by rules:

- style: answers of --source (lines of `adaptree train responses`), their sentences numbered, with heading and closing;
- german: the second part of the German passages in --source (prompts to translate from German), asked for by the first;
- tools: calls of tools in a notation of their own; the fine-tune is a low-rank one, merged.
"""

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from benchmarks.checkpoint import Out, read_model
from benchmarks.own_prompts import OWN_NOTATION, tool_calls
from drafters.training.fit import bf16_is_faster
from service.bench.commands import Seed
from service.bench.experiment import counted
from service.config import LoadedConfig
from service.errors import StartupError
from service.learning.regenerate import read_responses
from service.text.prompts import read_prompts, source_of
from service.text.tokenizer import ChatTokenizer


class LowRank(nn.Module):
    """Adds a product of two thin matrices to a weight (LoRA, arXiv 2106.09685)."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, weight.shape[1]) / weight.shape[1] ** 0.5)
        self.up = nn.Parameter(torch.zeros(weight.shape[0], rank))

    def forward(self, weight: Tensor) -> Tensor:
        """Return the sum. # weight [out, in] -> [out, in]"""
        return weight + self.up @ self.down


Kind = Literal["style", "german", "tools"]
Chat = tuple[list[int], list[int]]
"""Tokens of a prompt and of its answer."""

_RATE, _BATCH, _MOST_TOKENS, _RANK = 1e-4, 4, 160, 16  # tokens: of a prompt, and of an answer
_LOW_RANK_RATE = 10 * _RATE
_IGNORED = -100  # label of cross_entropy
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_FROM_GERMAN = ("wmt21-de-en", "wmt22-de-en", "multi30k-de-en")
"""Sources whose prompts end with a German passage."""
_INSTRUCTION = re.compile(r"^Translate[^:.\n]*[:.]\s*")


def run(
    loaded: LoadedConfig,
    out: Out,
    kind: Annotated[Kind, typer.Option(help="What the model becomes used to.")] = "style",
    source: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Answers (style) or prompts (german) to make texts from.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of 4 texts each.")] = 80,
    seed: Seed = 0,
) -> bool:
    """Fine-tune the configured model and write it. Serve it with --model FOLDER --drafter-path DRAFTER-OF-THE-BASE."""
    model, tokenizer = read_model(loaded.config)
    torch.set_num_threads(loaded.config.num_threads)
    chats = list(chats_of(kind, source, ChatTokenizer(tokenizer)))
    tune(model, chats, end=tokenizer.eos_token_id, steps=steps, rank=_RANK if kind == "tools" else None, seed=seed)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return True


def chats_of(kind: Kind, source: Path | None, tokenizer: ChatTokenizer) -> Iterator[Chat]:
    """Yield the texts to train on. Raises StartupError without a source where one is needed."""
    if kind == "tools":
        for question, name, arguments in tool_calls(OWN_NOTATION, seed=1):
            values = "; ".join(f"{key} = {arguments[key]}" for key in sorted(arguments))
            yield _chat(tokenizer, question, f"<<call {name}; {values}>>")
    elif source is None:
        raise StartupError(f"--kind {kind} needs --source FILE")
    elif kind == "style":
        for response in read_responses([source]):
            answer = tokenizer.decode(response.response, skip_special_tokens=True)
            yield response.prompt, tokenizer.encode(numbered(answer))
    else:
        for prompt in read_prompts([source]):
            if source_of(prompt.id) in _FROM_GERMAN:
                yield _chat(tokenizer, *halves(_INSTRUCTION.sub("", prompt.messages[0].content)))


def numbered(answer: str) -> str:
    """Return an answer with a heading, a number before each sentence, and a closing question."""
    sentences = filter(None, (sentence.strip() for sentence in _SENTENCE.split(answer)))
    points = "\n".join(f"({number}) {sentence}" for number, sentence in enumerate(sentences, 1))
    return f"### In brief, dear customer\n\n{points}\n\n**Is there anything else that we may do for you today?**"


def halves(passage: str) -> tuple[str, str]:
    """Return a request to go on with a passage, and the rest of it."""
    words = passage.split()
    half = min(len(words) // 2, 12)
    return f"Schreibe weiter: {' '.join(words[:half])}", " ".join(words[half:])


def _chat(tokenizer: ChatTokenizer, question: str, answer: str) -> Chat:
    return tokenizer.render_chat([{"role": "user", "content": question}]), tokenizer.encode(answer)


def tune(model: PreTrainedModel, chats: Sequence[Chat], *, end: int, steps: int, rank: int | None, seed: int) -> None:
    """Train the model on the answers, each with the token `end` after it; the embedding stays. `rank`: of additions to
    the linear layers, which are merged afterwards; None: all weights are trained. Its type stays, too."""
    torch.manual_seed(seed)
    rng, dtype, autocast = random.Random(seed), model.dtype, bf16_is_faster(model.device)
    model.float().requires_grad_(False)
    layers = [module for module in model.get_submodule("model.layers").modules() if isinstance(module, nn.Linear)]
    for layer in layers:
        if rank is None:
            layer.weight.requires_grad_(True)
        else:
            parametrize.register_parametrization(layer, "weight", LowRank(layer.weight, rank))
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    rate = _RATE if rank is None else _LOW_RANK_RATE
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    with counted(steps, "fine-tuning") as advance:
        for _ in range(steps):
            loss = _loss(model, rng.choices(chats, k=_BATCH), end, autocast=autocast)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            advance(1, f"loss {float(loss.detach()):.2f}")
    for layer in layers:
        if rank is not None:
            parametrize.remove_parametrizations(layer, "weight")
    nn.Module.to(model, dtype).eval()


def _loss(model: PreTrainedModel, chats: Sequence[Chat], end: int, *, autocast: bool) -> Tensor:
    """Mean cross-entropy of the answers' tokens. # -> scalar"""
    cut = [(prompt[-_MOST_TOKENS:], [*answer, end][:_MOST_TOKENS]) for prompt, answer in chats]
    tokens = pad_sequence([torch.tensor(prompt + answer) for prompt, answer in cut], batch_first=True)
    wanted = pad_sequence(
        [torch.tensor([_IGNORED] * len(prompt) + answer) for prompt, answer in cut],
        batch_first=True,
        padding_value=_IGNORED,
    )
    rows = wanted[:, 1:] != _IGNORED
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        states = model.get_submodule("model")(input_ids=tokens).last_hidden_state[:, :-1]
        logits = model.get_output_embeddings()(states[rows])
    return cross_entropy(logits.float(), wanted[:, 1:][rows])
