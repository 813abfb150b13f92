"""Tools of `/v1/responses` as functions, which is what models call: custom tools take one string, and a tool of a
namespace is called by both names."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from service.api.responses_schemas import CustomTool, FunctionTool, GrammarInput, Namespace

INPUT = "input"
"""The argument of a custom tool."""


class _Named(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def namespace(self) -> str | None: ...


def function_name(item: _Named) -> str:
    """Of the function that stands for a tool."""
    return item.name if item.namespace is None else f"{item.namespace}__{item.name}"


class Tool(NamedTuple):
    """A tool of the client's."""

    name: str
    namespace: str | None
    is_custom: bool


class ClientTools:
    """What a request lets the answer call."""

    def __init__(self, tools: Sequence[FunctionTool | CustomTool | Namespace]) -> None:
        self.functions: list[dict[str, Any]] = []
        """The same tools as chat completions take them."""
        self.grammars: dict[str, str] = {}
        """Of inputs, in Lark, by their places in the request. No grammar of calls can hold them, which are JSON."""
        self._tools: dict[str, Tool] = {}
        self._paths: list[str] = []
        for place, tool in enumerate(tools):
            if isinstance(tool, Namespace):
                for inner_place, inner in enumerate(tool.tools):
                    self._add(inner, f"tools.{place}.tools.{inner_place}", tool)
            else:
                self._add(tool, f"tools.{place}", None)

    def find(self, function: str) -> Tool:
        """The tool that a call of this function is meant for."""
        return self._tools[function]

    def renamed(self, param: str) -> str:
        """A field of a function as a field of its tool."""
        if not (found := re.match(r"tools\.(\d+)(\.function)?", param)):
            return param
        return self._paths[int(found[1])] + param[found.end() :]

    def _add(self, tool: FunctionTool | CustomTool, path: str, within: Namespace | None) -> None:
        described = Tool(tool.name, within.name if within else None, isinstance(tool, CustomTool))
        texts = (within.description if within else None, tool.description)
        function: dict[str, Any] = {
            "name": function_name(described),
            "description": "\n".join(filter(None, texts)) or None,
        }
        if isinstance(tool, FunctionTool):
            function |= {"parameters": tool.parameters, "strict": tool.strict}
        else:
            function |= {"parameters": self._input_of(tool, path), "strict": True}
        kept = {key: value for key, value in function.items() if value is not None}
        self.functions.append({"type": "function", "function": kept})
        self._tools[function["name"]] = described
        self._paths.append(path)

    def _input_of(self, tool: CustomTool, path: str) -> dict[str, Any]:
        """The schema of a custom tool's arguments."""
        text: dict[str, Any] = {"type": "string"}
        if isinstance(tool.format, GrammarInput) and tool.format.syntax == "regex":
            text["pattern"] = f"^(?:{tool.format.definition})$"
        elif isinstance(tool.format, GrammarInput):
            text["description"] = f"In this grammar:\n{tool.format.definition}"
            self.grammars[f"{path}.format.definition"] = tool.format.definition
        return {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
