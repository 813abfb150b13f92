"""`adaptree drafter adapt`: trains a drafter offline on a log of texts, and writes it in its own format if it wins.

It runs stages 2 and 3 of `adaptree train`: extracts the target's features of the texts, then trains from the drafter's
weights. The same gate as in serving compares both drafters on held-out texts. Until then, all files are in a work
folder next to the result, from which an interrupted run is resumed.
"""

import shutil
import time
from collections.abc import Collection, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from pydantic import AliasChoices, AliasPath, Field, model_validator

from adaptation.config import Tuning
from adaptation.evaluator import replay_of
from adaptation.publisher import Gate, GateDecision
from drafters import folders as published
from drafters.network.checkpoint import CARD_FILE, DrafterError, TargetParts
from drafters.network.config import DrafterConfig
from drafters.network.model import SpecBlock
from drafters.trained_kinds import OF_TARGETS
from drafters.training.corpus import Example, TrainingError
from drafters.training.fit import Length
from kernels.layers import Embedding
from service.api.prompts import render
from service.api.schemas import ChatMessage, ChatTemplateFields, text_of
from service.assembly import device_of, load_target
from service.config import ServiceConfig
from service.drafter import local_folder
from service.engine.weights import LoadedModel, completed, target_config
from service.errors import RequestError, StartupError
from service.learning.features import FEATURE_SHARE, make_features, make_folder, processes
from service.learning.fit import STATE_FILE, FitPlan, autocasts, fit, kept_length, target_dtype
from service.learning.learnt import new_folder
from service.learning.options import FitOptions
from service.learning.regenerate import Response
from service.logging import say
from service.text.prompts import read_lines
from service.text.tokenizer import ChatTokenizer

_GATE = Tuning()
_NEEDED = round(_GATE.gate_texts / _GATE.validation_share)


class LoggedChat(ChatTemplateFields):
    """A line of the log: a conversation that ends with the target's answer, given as messages, or as the bodies
    `request` and `response` of /v1/chat/completions."""

    messages: list[ChatMessage] = Field(validation_alias=AliasChoices("messages", "prompt", "input"), min_length=1)
    answer: ChatMessage | None = Field(None, validation_alias=AliasPath("response", "choices", 0, "message"))
    text: str | None = Field(None, validation_alias=AliasChoices("completion", "output"))

    @model_validator(mode="before")
    @classmethod
    def _with_its_request(cls, line: Any) -> Any:
        request = line.get("request") if isinstance(line, dict) else None
        return {**line, **request} if isinstance(request, dict) else line

    @model_validator(mode="after")
    def _has_an_answer(self) -> "LoggedChat":
        if len(self.turns) < 2 or self.turns[-1].role != "assistant":
            raise ValueError("no answer: `messages` must end with the assistant's, or give `response`")
        return self

    @property
    def turns(self) -> list[ChatMessage]:
        """All messages of the conversation; the answer is the last one."""
        text = None if self.text is None else ChatMessage(role="assistant", content=self.text)
        return [*self.messages, *(turn for turn in (self.answer, text) if turn is not None)]

    def tokens(self, tokenizer: ChatTokenizer, ends: Collection[int]) -> tuple[list[int], list[int]]:
        """Tokenize prompt and answer; the answer is cut after the first token in `ends`. Raises RequestError."""
        body, tools = ChatTemplateFields(chat_template_kwargs=self.chat_template_kwargs), self.tools or ()
        prompt = render(self.turns[:-1], body, tokenizer, tools)
        whole = render(self.turns, body.model_copy(update={"add_generation_prompt": False}), tokenizer, tools)
        answer = whole[len(prompt) :]
        if whole[: len(prompt)] != prompt:  # the template renders an answer differently from its generation prompt
            answer = tokenizer.encode(text_of(self.turns[-1].content or ""))
        last = next((place for place, token in enumerate(answer, 1) if token in ends), len(answer))
        return prompt, answer[:last]


def adapt(config: ServiceConfig, drafter: Path, texts: Path, out: Path, *, minutes: float, seed: int) -> bool:
    """Train a drafter on a log of texts, and write it to `out` if it passes the gate; returns whether it was written.
    An interrupted run is resumed and keeps its length. Raises StartupError."""
    began, out, drafter = time.monotonic(), new_folder(out), local_folder(drafter)
    try:
        shape = _shape(config, drafter)
        chats = list(read_lines(texts, LoggedChat, "log"))
        ranks, device = processes(config), device_of(config.device)
        loaded = load_target(config, device, target_dtype(device))
        old = _load(drafter, loaded)  # early, so that a bad drafter is refused before anything is computed
        work = _work_folder(drafter, texts, out, f"{loaded.fingerprint} {seed}")
        length, features, trained = kept_length(work / "drafter"), work / "features", work / "drafter"
        if length is None:
            responses = work / f"{texts.stem}.jsonl"
            responses.write_text(_responses(chats, loaded, config.max_model_len or loaded.max_positions))
            deadline = began + FEATURE_SHARE * minutes * 60
            make_features(config, [responses], features, deadline=deadline, loaded=loaded, taps=shape.tap_layers)
            length = Length(seconds=minutes * 60 - (time.monotonic() - began))
            if (length.seconds or 0) <= 0:
                raise StartupError("reading texts took all the time: run again (it is kept), or give more --minutes")
        without = {"rank": published.form_of(drafter) is not None, "coupling": not shape.coupled}
        options = FitOptions(
            kind=shape.kind, ablate=",".join(name for name, is_so in without.items() if is_so), seed=seed
        )
        plan = FitPlan(features, trained, length, options, autocasts(trained, device), drafter, _GATE.validation_share)
        _, apart = plan.examples()
        if len(apart) < _GATE.gate_texts:
            raise StartupError(f"{texts}: too few texts of different prompts, or too little time: {_NEEDED} are needed")
        fit(loaded, plan, ranks)
        published.write_like(drafter, trained, loaded.parts)
        decision = _judge(old, _load(trained, loaded), apart, loaded)
    except (DrafterError, TrainingError) as error:
        raise StartupError(str(error)) from error
    found = (
        f"{decision.serving_mean:.3f} tokens per verify before, {decision.candidate_mean:.3f} after, replayed on "
        f"{decision.num_texts} texts held back; a gain above {decision.needed:.3f} counts"
    )
    if decision.publish:
        (trained / STATE_FILE).unlink()
        _add_to_card(trained / CARD_FILE, found, drafter / CARD_FILE)
        trained.rename(out)
    shutil.rmtree(work)
    say(f"the new drafter is in {out}: {found}" if decision.publish else f"keeps the old drafter: {found}")
    return decision.publish


def _shape(config: ServiceConfig, drafter: Path) -> DrafterConfig:
    """Read the drafter's config and check it without loading the target. Raises StartupError."""
    described = target_config(config.model_source, revision=config.revision)
    try:
        shape = published.config_of(drafter, TargetParts("", torch.empty(0), None, None, described, completed))
    except DrafterError as error:
        raise StartupError(f"{error}; give a drafter of this target with --drafter, or its own with --model") from error
    if shape.kind in OF_TARGETS:
        raise StartupError(f"--drafter {drafter}: one of kind {shape.kind} is part of its target's files; give another")
    return shape


def _work_folder(drafter: Path, texts: Path, out: Path, others: str) -> Path:
    """Create the run's work folder next to the result; its name depends on the inputs."""
    digest = sha256(texts.read_bytes() + published.weights_bytes(drafter) + others.encode()).hexdigest()
    folder = out.with_name(f".{out.name}-{digest[:8]}")
    make_folder(folder)
    say(f"working in {folder}: an interrupted run is resumed from there")
    return folder


def _responses(chats: Sequence[tuple[str, LoggedChat]], loaded: LoadedModel, most: int) -> str:
    """Tokenize the texts, and return those of at most `most` tokens as JSON lines. Raises StartupError."""
    tokenizer, lines = ChatTokenizer(loaded.tokenizer), list[str]()
    for number, (where, chat) in enumerate(chats):
        try:
            prompt, answer = chat.tokens(tokenizer, loaded.eos_token_ids)
        except RequestError as error:
            raise StartupError(f"{where}: {error.message}") from error
        response = Response(id=f"text-{number}", temperature=0.0, prompt=prompt, response=answer)
        lines += [response.model_dump_json() + "\n"] if response.num_tokens <= most else []
    if len(lines) < len(chats):
        say(f"left out {len(chats) - len(lines)} texts of more than {most} tokens")
    return "".join(lines)


def _load(folder: Path, loaded: LoadedModel) -> SpecBlock:
    return published.load(folder, loaded.parts, dtype=torch.float32, device=loaded.model.device)


def _judge(old: SpecBlock, new: SpecBlock, apart: Sequence[Example], loaded: LoadedModel) -> GateDecision:
    """Compare two drafters by the gate, on held-out texts."""
    replay = replay_of(Embedding(loaded.parts.embedding))
    before, after = ([replay(model, text) for text in apart] for model in (old, new))
    gate = Gate(min_texts=_GATE.gate_texts, alpha=_GATE.gate_alpha, judgements=1)
    return gate.decide(after, before, before)


def _add_to_card(card: Path, found: str, before: Path) -> None:
    """Append the gate's result and the old drafter's card to the new drafter's card."""
    old = f"\n# The drafter before\n\n{before.read_text()}" if before.is_file() else ""
    card.write_text(f"{card.read_text()}\n## Judged by the gate\n\n{found}\n{old}")
