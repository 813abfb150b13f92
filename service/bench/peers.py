"""Other engines on the same weights, to measure ours against."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from service.assembly import Assembly
from service.bench.driver import Answer, Run
from service.engine.requests import GenerationRequest
from service.engine.weights import resolve


class TransformersPeer:
    """Hugging Face `generate` with everything as it comes: stock model code, stock attention, its own cache."""

    name = "transformers"

    def __init__(self, assembly: Assembly) -> None:
        config = assembly.config
        source = resolve(config.model_source, cache_dir=config.state_dir / "cache")
        self._device = assembly.target.device
        self._model = AutoModelForCausalLM.from_pretrained(
            source,
            revision=config.revision or "main",
            dtype=assembly.loaded.model.dtype,
            use_safetensors=True,
            trust_remote_code=False,
        )
        self._model = self._model.eval().requires_grad_(False).to(self._device)
        # Its own defaults (sampling, end of text) would win over anything left unset in a call.
        self._model.generation_config = GenerationConfig(pad_token_id=0)

    @torch.inference_mode()
    def run(self, requests: Sequence[GenerationRequest]) -> Run:
        """Answer all requests in one batch, each with exactly as many tokens as it asks for at most."""
        start = time.perf_counter()
        prompts, mask = _left_padded([request.prompt for request in requests], self._device)
        config = _generation_config(requests[0])
        output = self._model.generate(  # type: ignore[misc]  # transformers types it for another self
            prompts, attention_mask=mask, generation_config=config
        )
        assert isinstance(output, Tensor)
        answers: list[list[int]] = output[:, prompts.shape[1] :].tolist()
        seconds = time.perf_counter() - start
        return Run(tuple(Answer(tuple(tokens), "", "length", ()) for tokens in answers), (), seconds)


def _generation_config(request: GenerationRequest) -> GenerationConfig:
    params = request.sampling
    torch.manual_seed(params.seed)
    if params.temperature == 0:
        return GenerationConfig(max_new_tokens=params.max_tokens, do_sample=False, pad_token_id=0)
    return GenerationConfig(
        max_new_tokens=params.max_tokens,
        do_sample=True,
        temperature=params.temperature,
        top_k=0,
        top_p=1.0,
        pad_token_id=0,
    )


def _left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts that end together, and which of their tokens are real. # two [batch, length] int64"""
    length = max(map(len, prompts))
    tokens = torch.tensor([[0] * (length - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    return tokens, mask
