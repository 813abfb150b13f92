"""The families of models whose scores a judge has compared (`tests/conformance`, docs/models.md)."""

from service.errors import StartupError

VERIFIED = frozenset(
    {
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm4",
        "granite",
        "llama",
        "mistral",
        "olmo2",
        "olmo3",
        "phi3",
        "qwen2",
        "qwen3",
        "smollm3",
        "starcoder2",
    }
)
"""Model types in transformers. A type is added with its row in the conformance suite."""


def refuse_unverified(model_type: str, *, allowed: bool) -> None:
    """Raise StartupError for a family that no judge has compared, unless that is allowed."""
    if not allowed and model_type not in VERIFIED:
        raise StartupError(
            f"model type {model_type!r} is not verified: no test compares its scores with "
            "those of other engines; set unverified to serve it all the same. Verified are "
            f"{', '.join(sorted(VERIFIED))}"
        )
