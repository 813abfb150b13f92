"""Every sampling parameter is in the engine, in the bodies of all three routes and in the guide."""

from collections.abc import Iterator
from dataclasses import fields

import pytest

from service.api.responses_schemas import ResponsesRequest
from service.api.schemas import ChatCompletionRequest, CompletionRequest
from service.sampling_params import SamplingFields, SamplingParams
from tests.architecture.rules import ROOT


def rows() -> Iterator[str]:
    """The rows of the table in docs/api.md."""
    for name, schema in SamplingFields.model_json_schema()["properties"].items():
        kind = schema["anyOf"][0]
        limits = [kind[key] for key in ("minimum", "maximum") if key in kind]
        is_range = len(limits) == 2 and kind["type"] == "number"
        values = f"{limits[0]:g} to {limits[1]:g}" if is_range else kind["type"]
        yield f"| `{name}` | {values} | {schema['description']} |"


def test_the_guide_has_the_table() -> None:
    table = "\n".join(rows())
    assert table in (ROOT / "docs" / "api.md").read_text(), f"replace the table of sampling parameters by\n{table}"


def test_every_field_reaches_the_engine() -> None:
    resolved = {field.name for field in fields(SamplingParams)} - {"max_tokens", "num_logprobs"}
    assert resolved == SamplingFields.model_fields.keys()


@pytest.mark.parametrize("body", [ChatCompletionRequest, CompletionRequest, ResponsesRequest])
def test_every_route_accepts_every_field(body: type[SamplingFields]) -> None:
    declared = SamplingFields.model_fields.items()
    assert all(repr(body.model_fields[name]) == repr(field) for name, field in declared)
