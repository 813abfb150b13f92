"""Every route as the server describes it, and every body as OpenAI's own client types it, fuzzed: no answer is an error
of the server's, and every one is as it is described. The size is how many examples there are of each route."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as Chat
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as Text
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming as Response
from pydantic import TypeAdapter

from service.api.app import REFUSAL
from tests.e2e.clients.test_clients import HERE
from tests.environments import python_environment, run
from tests.processes import Process, serving_tiny

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
HOW = ["--checks", CHECKS, "--phases", "coverage,fuzzing", "--seed", "1", "--no-color"]
EXAMPLES, SECONDS_PER_EXAMPLE = 6, 50.0
BODIES: dict[str, Any] = {"/v1/chat/completions": Chat, "/v1/completions": Text, "/v1/responses": Response}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    running = serving_tiny(tmp_path_factory.mktemp("fuzzed"), kv_cache="200MiB", max_output_tokens=4, admin_key="boss")
    yield running
    running.end()


@pytest.fixture
def fuzz(sized: Callable[[int], int], tell: Callable[..., None]) -> Callable[..., None]:
    def fuzz(document: str, *more: str) -> None:
        examples = sized(EXAMPLES)
        command = ["bin/schemathesis", "run", document, *HOW, "--max-examples", str(examples), *more]
        environment = python_environment(HERE / "schemathesis.txt")
        count = re.search(r"(\d+) generated", run(command, environment, timeout_seconds=SECONDS_PER_EXAMPLE * examples))
        assert count is not None
        tell(requests=int(count[1]))

    return fuzz


def openai_bodies() -> dict[str, Any]:
    """A document of their routes, for a model that is served."""
    adapters = [(path, "validation", TypeAdapter(typed)) for path, typed in BODIES.items()]
    schemas, shared = TypeAdapter.json_schemas(adapters, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    answers = {"200": {"description": "The answer.", "content": {"application/json": {}}}, "default": REFUSAL}
    paths = {}
    for (path, _), schema in schemas.items():
        described = shared["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
        described["properties"]["model"] = {"const": "tiny"}
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths[path] = {"post": {"requestBody": body, "responses": answers}}
    info = {"title": "OpenAI's bodies, as their client types them", "version": "1"}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": shared.get("$defs", {})}}


@pytest.mark.slow  # a faster one, of the application alone, is tests/service/api/test_never_500.py
def test_every_route_as_it_is_described(server: Process, fuzz: Callable[..., None]) -> None:
    fuzz(f"{server.url}/openapi.json", "--exclude-path", "/adaptree/feed", "-H", "authorization: Bearer boss")


@pytest.mark.slow
def test_every_body_as_openai_types_it(server: Process, tmp_path: Path, fuzz: Callable[..., None]) -> None:
    document = tmp_path / "openai.json"
    document.write_text(json.dumps(openai_bodies()))
    fuzz(str(document), "--url", server.url)
