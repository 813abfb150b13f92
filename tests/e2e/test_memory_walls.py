"""Whose answers are drafted from: a whole server as its settings make it, asked over HTTP, and each tree that it grows.
Texts are the same in any case; a tree tells what was written before."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from torch import Tensor

from drafters.memory.drafter import MemoryDrafter
from drafters.protocol import Noise
from drafters.tree import Candidates
from service.serve import application
from tests.service.api.client import events_of
from tests.service.bench.parts import save_two_layers, settings_for

QUESTION = "so it is that the other was what it is"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 24},
    "/v1/completions": {"prompt": QUESTION, "max_tokens": 24},
    "/v1/responses": {"input": QUESTION, "max_output_tokens": 24},
}
CHAT = "/v1/chat/completions"
Tree = tuple[object, ...]
Trees = list[Tree]


@dataclass
class Sender:
    """A client of a server, with what was grown for it."""

    app: FastAPI
    grown: Trees
    key: str = ""
    address: str = "a"

    async def send(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx2.Response:
        transport = httpx2.ASGITransport(app=self.app, client=(self.address, 1))
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
            return await client.request(method, path, json=body, timeout=60)

    async def ask(self, path: str = CHAT, **spoken: Any) -> Trees:
        """The trees that were grown for an answer."""
        self.grown.clear()
        fields = {"model": "tiny", "temperature": 0, "seed": 1}
        response = await self.send("POST", path, {**fields, **BODIES[path], **spoken})
        assert response.status_code == 200, response.text
        return list(self.grown)

    async def forget(self, path: str = "/v1/memory") -> None:
        response = await self.send("DELETE", path)
        assert (response.status_code, response.json()) == (200, {"object": "memory", "deleted": True})


@dataclass
class Servers:
    """Makes servers of one model, new ones each time."""

    folder: Path
    grown: Trees = field(default_factory=list)

    @asynccontextmanager
    async def serving(self, **changes: Any) -> AsyncIterator[Callable[..., Sender]]:
        changes = {"drafter": "memory", "budget_policy": "fixed", "max_budget": 16, "prefix_cache": "off"} | changes
        settings = settings_for(self.folder)
        given = settings.model_dump(exclude_unset=True) | {"served_model_name": "tiny", "admin_key": "boss"}
        app, runtime = application(type(settings).model_validate({**given, **changes}))
        async with app.router.lifespan_context(app):
            await runtime.wait_until_loaded()
            yield partial(Sender, app, self.grown)

    async def of_new_server(
        self, key: str = "", path: str = CHAT, *, store: bool | None = None, **changes: Any
    ) -> Trees:
        """The trees of one answer of a server that has not answered before."""
        async with self.serving(**changes) as sender:
            trees = await sender(key).ask(path, store=store)
        assert any(sizes != [0] for *_, sizes in trees), "something is drafted from the text itself"
        return trees

    async def of_known_prompt(self, key: str, user: str, **changes: Any) -> Trees:
        """As `of_new_server`, but the prompt is in the prefix cache: one step more is drafted."""
        async with self.serving(**changes) as sender:
            await sender(key).ask(user=user, store=False)
            return await sender(key).ask(user=user)


@pytest.fixture
def servers(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Servers:
    servers, grow = Servers(save_two_layers(tmp_path_factory.mktemp("model"))), MemoryDrafter.grow

    def recorded(drafter: MemoryDrafter, rows: Tensor, noise: Noise) -> Candidates:
        tree = grow(drafter, rows, noise)
        servers.grown.append(tuple(part.tolist() for part in tree))
        return tree

    monkeypatch.setattr(MemoryDrafter, "grow", recorded)
    return servers


KEYS: dict[str, Any] = {"api_keys": ["one", "two"]}


async def test_keys_draft_from_their_own_past_alone(servers: Servers) -> None:
    expected = await servers.of_new_server("two", **KEYS)
    async with servers.serving(**KEYS) as sender:
        await sender("one").ask()
        assert await sender("two").ask() == expected
        assert await sender("one", address="b").ask() != expected


async def test_names_of_a_key_are_kept_apart_if_asked_for(servers: Servers) -> None:
    settings: dict[str, Any] = {**KEYS, "prefix_cache": "per_client"}
    expected = await servers.of_new_server("one", **settings)
    async with servers.serving(**settings) as sender:
        await sender("one").ask(user="u")
        assert await sender("one").ask(user="v") == expected
        assert await sender("two").ask(user="u") == expected
        assert await sender("one").ask(user="u") != await servers.of_known_prompt("one", "u", **settings)


@pytest.mark.parametrize("path", BODIES)
async def test_what_must_not_be_stored_is_not_remembered(servers: Servers, path: str) -> None:
    expected = await servers.of_new_server(path=path)
    async with servers.serving() as sender:
        await sender().ask(path, store=False)
        assert await sender().ask(path) == expected
        assert await sender().ask(path) != expected


async def test_what_must_not_be_stored_is_not_remembered_when_it_is_taken_up_again(servers: Servers) -> None:
    expected = await servers.of_new_server()
    async with servers.serving() as sender:
        await sender().ask(store=False, stream=True, resume_from=5)
        assert await sender().ask() == expected
        await sender().ask(stream=True, resume_from=5)
        assert await sender().ask() != expected


async def test_a_name_that_stores_nothing_takes_no_other_names_place(servers: Servers) -> None:
    settings: dict[str, Any] = {"api_keys": ["one"], "prefix_cache": "per_client", "max_sequences": 1}
    expected = await servers.of_known_prompt("one", "u", **settings)
    unstored = await servers.of_new_server("one", store=False, **settings)
    async with servers.serving(**settings) as sender:
        await sender("one").ask(user="u")
        assert await sender("one").ask(user="v", store=False) == unstored
        assert await sender("one").ask(user="u") != expected
        await sender("one").ask(user="v")
        assert await sender("one").ask(user="u") == expected, "the one share of the key was taken"


async def test_a_client_forgets_its_own_and_an_operator_all(servers: Servers) -> None:
    expected = await servers.of_new_server("one", **KEYS)
    async with servers.serving(**KEYS) as sender:
        one, two, boss = map(sender, ("one", "two", "boss"))
        await one.ask()
        await two.forget()
        assert await one.ask() != expected
        await two.ask()
        await one.forget()
        assert await one.ask() == expected
        assert await two.ask() != expected
        await boss.forget("/v1/adaptation/memory")
        assert await one.ask() == expected
        assert await two.ask() == expected


async def test_a_name_forgets_its_own(servers: Servers) -> None:
    settings: dict[str, Any] = {**KEYS, "prefix_cache": "per_client"}
    expected = await servers.of_known_prompt("one", "u", **settings)
    async with servers.serving(**settings) as sender:
        one = sender("one")
        await one.ask(user="u")
        await one.ask(user="v")
        await one.forget("/v1/memory?user=u")
        assert await one.ask(user="u") == expected
        assert await one.ask(user="v") != expected


def paths_of(tree: dict[str, Any]) -> set[str]:
    """Words from the root to each node. Their order is by chances that are corrected by what came true of all trees."""
    paths: list[str] = []
    for text, parent in zip(tree["texts"], tree["parents"], strict=True):
        paths.append((paths[parent] if parent >= 0 else "") + "|" + text)
    return set(paths)


async def shown(send: Callable[..., Awaitable[httpx2.Response]]) -> list[set[str]]:
    """The paths of each tree that a client is shown."""
    body = {"model": "tiny", "temperature": 0, "stream": True, "speculation": {"trace": True}, **BODIES[CHAT]}
    steps = [
        chunk["choices"][0].get("speculation")
        for chunk in events_of(await send("POST", CHAT, body))
        if chunk["choices"]
    ]
    trees = [paths_of(step["tree"]) for step in steps if step is not None]
    assert any(trees)
    return trees


async def test_without_keys_a_trace_shows_no_past_answers(servers: Servers) -> None:
    async with servers.serving() as sender:
        expected = await shown(sender().send)
        trees = await sender().ask()
        assert await shown(sender().send) == expected
        assert await sender().ask() != trees, "there is a past"
    assert trees == await servers.of_new_server(), "an answer that is traced is not remembered"


async def test_with_keys_a_trace_shows_the_past_of_its_own_key(servers: Servers) -> None:
    async with servers.serving(**KEYS) as sender:
        expected = await shown(sender("two").send)
        await sender("one").ask()
        await sender("two").forget()
        assert await shown(sender("two").send) == expected
        assert await shown(sender("one").send) != expected
