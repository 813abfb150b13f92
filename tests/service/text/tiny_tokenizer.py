"""A byte-level tokenizer with a few merges, special tokens and a chat template: small, but of the usual kind."""

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

SPECIALS = ("<|bos|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if greeting %}{{ greeting }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def tiny_backend() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("Ã", "¤")]
    pieces = [*alphabet, *(left + right for left, right in merges)]
    backend = Tokenizer(BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(special, normalized=False) for special in SPECIALS])
    bos = backend.token_to_id("<|bos|>")
    backend.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", bos)])
    return backend


def tiny_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tiny_backend(), bos_token="<|bos|>")
    tokenizer.chat_template = template
    return tokenizer
