"""The files of the live page: open, small, cached by content, and under a policy that lets nothing foreign in."""

import re
from importlib.resources import files

import pytest

from service.api.page import PAGE_PATHS
from tests.service.api.client import client_of
from tests.service.scripted import ScriptedEngine, say

pytestmark = pytest.mark.anyio

MOST_BYTES = 60_000
TYPES = {"/": "text/html", "css": "text/css", "js": "text/javascript"}


async def test_every_file_is_open_and_typed() -> None:
    async with client_of(ScriptedEngine(say("x")), api_keys=("key",), open_metrics=False) as client:
        for path in PAGE_PATHS:
            response = await client.get(path)
            expected = TYPES[path.rpartition(".")[2]]
            assert (response.status_code, response.headers["content-type"]) == (200, f"{expected}; charset=utf-8")
            assert response.headers["x-content-type-options"] == "nosniff"


async def test_the_page_is_small() -> None:
    async with client_of(ScriptedEngine(say("x"))) as client:
        sizes = {path: len((await client.get(path)).content) for path in PAGE_PATHS}
    assert sum(sizes.values()) < MOST_BYTES
    assert min(sizes.values()) > 500


async def test_the_policy_lets_nothing_foreign_or_inline_in() -> None:
    async with client_of(ScriptedEngine(say("x"))) as client:
        policy = (await client.get("/")).headers["content-security-policy"]
    rules = {rule.split()[0]: rule.split()[1:] for rule in policy.split(";")}
    assert rules["default-src"] == ["'none'"]
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == ["'self'"]
    assert rules["frame-ancestors"] == ["'none'"]
    assert "unsafe" not in policy


async def test_an_unchanged_file_is_not_sent_again() -> None:
    async with client_of(ScriptedEngine(say("x"))) as client:
        first = await client.get("/")
        again = await client.get("/", headers={"if-none-match": first.headers["etag"]})
        other = await client.get("/", headers={"if-none-match": '"other"'})
    assert (again.status_code, again.content) == (304, b"")
    assert other.content == first.content


async def test_only_the_files_of_the_page_are_served() -> None:
    async with client_of(ScriptedEngine(say("x"))) as client:
        for name in ("router.py", "__init__.py", "index.html", "../app.py", "%2e%2e/app.py", ""):
            assert (await client.get(f"/adaptree/page/{name}")).status_code == 404


def page_files() -> dict[str, str]:
    folder = files("service.api.page")
    return {file.name: file.read_text() for file in folder.iterdir() if file.name.endswith((".html", ".css", ".js"))}


def test_every_file_of_the_folder_is_served() -> None:
    assert {path.rpartition("/")[2] or "index.html" for path in PAGE_PATHS} == set(page_files())


def test_no_file_names_another_host() -> None:
    for name, text in page_files().items():
        hosts = set(re.findall(r"(?:https?:)?//([\w.-]+\.\w+)", text))
        assert hosts <= {"www.w3.org"}, name


def test_text_never_becomes_markup() -> None:
    for name, text in page_files().items():
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), name


def test_every_field_has_a_label() -> None:
    page = page_files()["index.html"]
    fields = set(re.findall(r'<(?:input|textarea|select|output)\b[^>]*\bid="([^"]+)"', page))
    labelled = set(re.findall(r'<label [^>]*for="([^"]+)"', page)) | {"step-text"}
    assert len(fields) >= 8
    assert fields == labelled
