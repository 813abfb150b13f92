"""`GET /openapi.json`: the routes, and the bodies of those that read their own."""

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


def described(app: FastAPI) -> dict[str, Any]:
    """The document of an application whose routes read their bodies themselves."""
    document = FastAPI.openapi(app)
    models: list[tuple[type[BaseModel], JsonSchemaMode]] = [(model, "validation") for model in BODIES.values()]
    _, schemas = models_json_schema(models, ref_template="#/components/schemas/{model}")
    document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
    for path, model in BODIES.items():
        schema = {"$ref": f"#/components/schemas/{model.__name__}"}
        content = {"required": True, "content": {"application/json": {"schema": schema}}}
        document["paths"][path]["post"]["requestBody"] = content
    return document
