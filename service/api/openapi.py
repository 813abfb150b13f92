"""`GET /openapi.json`: the routes, the bodies of those that read their own, and how every one answers."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from service.api.responses_schemas import ResponsesRequest
from service.api.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    UpdateWeightsRequest,
)

BODIES: Mapping[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/update_weights_from_disk": UpdateWeightsRequest,
}


_STREAM = "text/event-stream"
_ANSWERS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("/v1/chat/completions", "/v1/completions", "/v1/responses"), ("application/json", _STREAM)),
    "/adaptree/feed": (_STREAM,),
    "/metrics": ("text/plain", "application/openmetrics-text"),
}
"""Types of what is answered, where it is not JSON alone."""

_TEXT = {"type": ["string", "null"]}
_ERROR = {
    "type": "object",
    "properties": {"message": {"type": "string"}, "type": {"type": "string"}, "param": _TEXT, "code": _TEXT},
    "required": ["message", "type", "param", "code"],
}
REFUSAL: dict[str, Any] = {
    "description": "What was wrong, and with which field.",
    "content": {
        "application/json": {"schema": {"type": "object", "properties": {"error": _ERROR}, "required": ["error"]}}
    },
}
"""How every route answers what it cannot do."""


def described(app: FastAPI) -> dict[str, Any]:
    """The document of an application whose routes read their bodies themselves."""
    document = FastAPI.openapi(app)
    models: list[tuple[type[BaseModel], JsonSchemaMode]] = [(model, "validation") for model in BODIES.values()]
    _, schemas = models_json_schema(models, ref_template="#/components/schemas/{model}")
    document["components"] = {"schemas": schemas["$defs"]}
    for path, operations in document["paths"].items():
        content: dict[str, Any] = {kind: {} for kind in _ANSWERS.get(path, ("application/json",))}
        for operation in operations.values():
            operation["responses"] = {"200": {"description": "The answer.", "content": content}, "default": REFUSAL}
    for path, model in BODIES.items():
        schema = {"$ref": f"#/components/schemas/{model.__name__}"}
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        document["paths"][path]["post"]["requestBody"] = body
    return document
