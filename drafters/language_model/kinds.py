"""The two kinds: another model, and the target's own first layers."""

from drafters.kinds import Kind, Parts
from drafters.language_model.drafter import LanguageModelDrafter, scratch_places
from drafters.language_model.texts import OwnKeys, TargetKeys


def _early_exit(parts: Parts) -> LanguageModelDrafter:
    if not parts.argument.isdecimal():
        raise ValueError("say after how many layers to leave the target, as in early_exit(4)")
    assert parts.first_layers is not None, "a target has layers"
    model = parts.first_layers(int(parts.argument))
    return LanguageModelDrafter(f"early_exit({parts.argument})", model, TargetKeys(), parts.sizes)


def _draft_model(parts: Parts) -> LanguageModelDrafter:
    sizes = parts.sizes
    if parts.draft_model is None:
        raise ValueError("draft_model needs a model: set drafter_path to a folder, a .gguf file or a hub id")
    model = parts.draft_model(sizes.num_slots, scratch_places(sizes.max_sequences))
    return LanguageModelDrafter("draft_model", model, OwnKeys(sizes), sizes)


EARLY_EXIT = Kind(_early_exit, needs="layers")
DRAFT_MODEL = Kind(_draft_model, needs="model", takes_argument=False)
