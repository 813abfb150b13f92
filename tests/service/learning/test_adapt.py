"""`adaptree drafter adapt` from the outside: a log that teaches, one that does not, a kill, and what is refused."""

import json
import random
import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from drafters import folders as published
from drafters.network import checkpoint
from drafters.network.checkpoint import CARD_FILE, WEIGHTS_FILE
from drafters.training.corpus import TOP, Example
from drafters.training.fit import FitLoop, FitReport, Length
from drafters.training.replay import replay_served
from kernels.layers import Embedding
from service.assembly import assemble
from service.errors import StartupError
from service.learning.adapt import LoggedChat
from service.learning.commands import KEPT_EXIT_CODE
from service.learning.options import FitOptions
from service.text.tokenizer import ChatTokenizer
from tests.published_forms import DRAFT_VOCAB, eagle3, mimo
from tests.service.bench.parts import run_command, save_drafter, settings_for
from tests.taught import saved_taught
from tests.tiny_models import _COMMON, EOS_ID, load, stock, tiny_model, tiny_tokenizer

WORDS = "0123456789ABCDEF"
"""A language of one letter per word, each followed by one of two; no letters of it are merged into one token."""
STEPS = 40
TEXTS = 48


def speech(seed: int, length: int = 60) -> str:
    drawn = torch.Generator().manual_seed(seed)
    places = [int(torch.randint(16, (1,), generator=drawn))]
    for chance in torch.rand(length - 1, generator=drawn).tolist():
        places.append((places[-1] * 5 + (3 if chance < 0.9 else 8)) % 16)
    return "".join(WORDS[place] for place in places)


def chat(seed: int) -> list[dict[str, str]]:
    text = speech(seed)
    return [{"role": "user", "content": f"{seed} {text[:4]}"}, answered(text[4:])]


def answered(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def noise(seed: int) -> str:
    return "".join(random.Random(seed).choices(WORDS, k=56))


def written(file: Path, lines: list[object]) -> Path:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of eight layers that has learnt the language."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("target")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **(_COMMON | {"num_hidden_layers": 8})))
    tokenizer = ChatTokenizer(tiny_tokenizer())
    texts = torch.tensor([tokenizer.encode(speech(seed)) for seed in range(1000, 1000 + 64)])
    batches = (texts[torch.arange(step * 16, step * 16 + 16) % len(texts)] for step in range(80))
    return saved_taught(model, batches, folder)


@pytest.fixture(scope="module")
def drafters(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drafters that know nothing, in our form and in EAGLE's."""
    folder = tmp_path_factory.mktemp("drafters")
    save_drafter(
        folder / "own",
        assemble(settings_for(target).model_copy(update={"drafter": "memory", "budget_policy": "fixed"})),
    )
    file = eagle3(folder / "eagle3", norm_output=True) / WEIGHTS_FILE
    tensors = load_file(file)
    words = {"d2t": torch.zeros_like(tensors["d2t"]), "t2d": torch.arange(len(tensors["t2d"])) < DRAFT_VOCAB}
    table = {"embed_tokens.weight": load(target).parts.embedding}
    save_file({**tensors, **words, **table}, file)
    (folder / "eagle3" / CARD_FILE).write_text("What its authors say.")
    return folder


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("log") / "log.jsonl", [{"messages": chat(seed)} for seed in range(TEXTS)])


@pytest.fixture(scope="module", autouse=True)
def _quick(target: Path) -> Iterator[None]:
    """A run ends after so many steps however fast they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ADAPTREE_STATE_DIR", str(target / "state"))
        patch.setenv("ADAPTREE_LOAD_DTYPE", "float32")
        patch.setattr("service.logging.configure_logging", lambda level, *, as_json: None)
        patch.setattr(Length, "fraction", lambda self, steps, seconds: min(1.0, steps / STEPS))
        learns(patch, 5e-3)
        yield


def learns(patch: pytest.MonkeyPatch, rate: float, **options: Any) -> None:
    made = partial(FitOptions, learning_rate=rate, batch_tokens=500, warm_up=2, **{"evaluate_minutes": 60, **options})
    patch.setattr("service.learning.adapt.FitOptions", made)


def adapt(drafter: Path, target: Path, log: Path, out: Path) -> tuple[int, str]:
    words = ("--drafter", drafter, "--model", target, "--texts", log, "--out", out, "--minutes", 5)
    return run_command("drafter", "adapt", *words, "--threads", 1, "--device", "cpu")


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture(scope="module")
def adapted(target: Path, drafters: Path, log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the log makes of both, and what was written."""
    folder = tmp_path_factory.mktemp("adapted")
    for name in ("own", "eagle3"):
        code, output = adapt(drafters / name, target, log, folder / name)
        assert code == 0, output
        (folder / f"{name}.txt").write_text(output)
    assert names_in(folder) == {"own", "own.txt", "eagle3", "eagle3.txt"}
    return folder


@torch.no_grad()
def unseen(target: Path, taps: tuple[int, ...]) -> list[Example]:
    """Texts of no log, with features by transformers' own code."""
    model, tokenizer, found = stock(target), ChatTokenizer(tiny_tokenizer()), list[Example]()
    for seed in range(TEXTS, TEXTS + 8):
        prompt = tokenizer.render_chat(chat(seed)[:1])
        tokens = torch.tensor(prompt + tokenizer.encode(chat(seed)[1]["content"]))
        states = model(tokens[None], output_hidden_states=True).hidden_states
        labels = torch.zeros(len(tokens) - len(prompt) + 1, TOP)
        features = torch.cat([states[tap + 1][0] for tap in taps], dim=-1)
        found.append(Example(tokens, features, len(prompt), labels.int(), labels))
    return found


@pytest.mark.parametrize("name", ["own", "eagle3"])
def test_a_log_that_teaches_makes_a_better_drafter(target: Path, drafters: Path, adapted: Path, name: str) -> None:
    spoken = re.search(r"(\d\.\d+) tokens per verify before, (\d\.\d+) after, .* 12 texts", output_of(adapted, name))
    assert spoken is not None
    before, after = map(float, spoken.groups())
    loaded, taus = load(target), list[float]()
    for folder in (drafters, adapted):
        model = published.load(folder / name, loaded.parts, dtype=torch.float32, device="cpu")
        embed, texts = Embedding(loaded.parts.embedding), unseen(target, model.config.tap_layers)
        taus.append(sum(replay_served(model, embed, text).tau for text in texts) / len(texts))
    assert taus[1] > taus[0] + 0.5
    assert (before, after) == pytest.approx(taus, abs=0.2), "other texts of the same language"


def output_of(adapted: Path, name: str) -> str:
    return (adapted / f"{name}.txt").read_text()


def test_what_was_not_trained_stays_as_others_wrote_it(drafters: Path, adapted: Path) -> None:
    """All tensors of the layers change, and nothing else; the card says what was measured, and keeps what it stated."""
    old, new = drafters / "eagle3", adapted / "eagle3"
    assert names_in(new) == {"config.json", "model.safetensors", "README.md", "curve.jsonl"}
    assert (new / "config.json").read_bytes() == (old / "config.json").read_bytes()
    before, after = load_file(old / WEIGHTS_FILE), load_file(new / WEIGHTS_FILE)
    assert {name: (value.shape, value.dtype) for name, value in before.items()} == {
        name: (value.shape, value.dtype) for name, value in after.items()
    }
    same = {name for name, value in before.items() if value.equal(after[name])}
    assert same == {"d2t", "t2d", "embed_tokens.weight"}
    with safe_open(new / WEIGHTS_FILE, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    card = (new / CARD_FILE).read_text()
    assert output_of(adapted, "eagle3").strip().splitlines()[-1].partition(": ")[2] in card
    assert "What its authors say." in card


def test_our_own_form_says_what_it_was_trained_from(drafters: Path, adapted: Path) -> None:
    facts = checkpoint.describe(adapted / "own").facts
    assert facts["training"]["adapts"] == checkpoint.weights_sha256(drafters / "own")
    assert facts["training"]["steps"] == STEPS
    assert names_in(adapted / "own") == {"config.json", "model.safetensors", "README.md", "curve.jsonl"}


def test_a_log_that_teaches_nothing_keeps_the_old_drafter(target: Path, adapted: Path, tmp_path: Path) -> None:
    """No one foresees what its answers say."""
    lines: list[object] = [{"messages": [chat(seed)[0], answered(noise(seed))]} for seed in range(TEXTS)]
    log = written(tmp_path / "log.jsonl", lines)
    code, output = adapt(adapted / "own", target, log, tmp_path / "out")
    assert code == KEPT_EXIT_CODE == 3
    assert "keeps the old drafter" in output
    assert names_in(tmp_path) == {"log.jsonl"}


class Killed(StartupError):
    """What a kill is to a run."""


def test_a_run_goes_on_where_it_was_killed(
    target: Path, drafters: Path, adapted: Path, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between two steps, and once more after the last: weights are equal bit for bit."""
    true_run = FitLoop.run

    def killed_run(self: FitLoop, examples: list[Example], length: Length) -> Iterator[FitReport]:
        for report in true_run(self, examples, length):
            if report.position.step == 4:
                raise Killed
            yield report

    with monkeypatch.context() as patch:
        learns(patch, 5e-3, evaluate_minutes=0)
        patch.setattr(FitLoop, "run", killed_run)
        with pytest.raises(Killed):
            adapt(drafters / "eagle3", target, log, tmp_path / "out")
    (state,) = tmp_path.glob(".out-*/drafter/fit.pt")
    assert torch.load(state)["position"]["step"] == 3
    with monkeypatch.context() as patch:
        patch.setattr("service.learning.adapt.published.write_like", killed)
        with pytest.raises(Killed):
            adapt(drafters / "eagle3", target, log, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    code, output = adapt(drafters / "eagle3", target, log, tmp_path / "out")
    assert (code, f"resuming at step {STEPS}" in output) == (0, True)
    whole, torn = (load_file(folder / WEIGHTS_FILE) for folder in (adapted / "eagle3", tmp_path / "out"))
    assert [name for name, value in whole.items() if not value.equal(torn[name])] == []
    assert names_in(tmp_path) == {"out"}


def killed(*_: object) -> None:
    raise Killed


def test_lines_of_other_servers_are_read_as_the_same_conversation() -> None:
    asked, answer = [{"role": "user", "content": "in the hat"}], {"role": "assistant", "content": "and the cat"}
    lines: list[dict[str, object]] = [
        {"messages": [*asked, answer], "model": "m"},
        {"request": {"model": "m", "messages": asked}, "response": {"id": "c", "choices": [{"message": answer}]}},
        {"prompt": asked, "completion": "and the cat"},
        {"input": asked, "output": "and the cat"},
    ]
    tokenizer = ChatTokenizer(tiny_tokenizer())
    found = [LoggedChat.model_validate_json(json.dumps(line)).tokens(tokenizer, {EOS_ID}) for line in lines]
    assert found == [(tokenizer.render_chat(asked), [*tokenizer.encode("and the cat"), EOS_ID])] * 4


def test_what_cannot_be_adapted_is_refused_before_anything_is_loaded(
    target: Path, drafters: Path, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.learning.adapt.load_target", killed)
    wide = tiny_model("llama", tmp_path / "wide", num_hidden_layers=8, hidden_size=64)
    words = tiny_model("llama", tmp_path / "words", num_hidden_layers=8, vocab_size=400)
    flat = tiny_model("llama", tmp_path / "flat", num_hidden_layers=1)
    unknown = copytree(drafters / "eagle3", tmp_path / "unknown")
    (unknown / "config.json").write_text(json.dumps({"architectures": ["LlamaEagle4"]}))
    silent = written(tmp_path / "silent.jsonl", [{"messages": chat(0)}, {"messages": chat(1)[:1]}])
    for drafter, model, texts, message in (
        (drafters / "own", wide, log, "its hidden_size is 48, the target's is 64; give a drafter of this target"),
        (drafters / "eagle3", wide, log, "its hidden_size is 48, the target's is 64; give a drafter of this target"),
        (drafters / "own", words, log, "its vocab_size is 320, the target's is 400"),
        (drafters / "eagle3", words, log, "its vocab_size is 320, the target's is 400"),
        (drafters / "own", flat, log, "it taps layers 0, 1, and the target has 1"),
        (drafters / "eagle3", flat, log, "it taps the fourth layer from the end, and the target has 1"),
        (unknown, target, log, "names LlamaEagle4, which is none of"),
        (mimo(tmp_path / "mimo"), tmp_path / "mimo", log, "of kind mtp is part of its target's files"),
        (drafters / "own", target, silent, "line 2: .*no answer"),
        (tmp_path / "none", target, log, "config.json cannot be read"),
    ):
        began = time.monotonic()
        with pytest.raises(StartupError, match=message):
            adapt(drafter, model, texts, tmp_path / "out")
        assert time.monotonic() - began < 1
    with pytest.raises(StartupError, match="exists and is not an empty folder"):
        adapt(drafters / "own", target, log, tmp_path)


def test_what_is_seen_of_the_target_alone_is_refused_by_name(
    target: Path, drafters: Path, log: Path, tmp_path: Path
) -> None:
    other = tiny_model("llama", tmp_path / "other", num_hidden_layers=8, seed=3)
    for name, message in (("own", "trained for target"), ("eagle3", r"its embed_tokens\.weight is not the target's")):
        with pytest.raises(StartupError, match=message):
            adapt(drafters / name, other, log, tmp_path / name)
    few = written(tmp_path / "few.jsonl", [{"messages": chat(seed)} for seed in range(20)])
    with pytest.raises(StartupError, match="32 are needed"):
        adapt(drafters / "own", target, few, tmp_path / "few")
