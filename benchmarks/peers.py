"""`python -m benchmarks speed --peer NAME`: `adaptree bench speed` with another engine on the same weights.

Each engine runs with its own default settings. llama.cpp is opened here for other benchmarks too.
"""

import importlib.metadata
import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import geometric_mean
from typing import Annotated, Any, Literal

import torch
import typer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, GenerationConfig

from kernels.cpu.library import threads_in_use
from service.assembly import Assembly, device_of
from service.bench.commands import (
    AnswerTokens,
    Concurrency,
    Limit,
    MorePromptFiles,
    Out,
    PromptFiles,
    Seed,
    Temperatures,
)
from service.bench.driver import Answer, Run
from service.bench.experiment import PLAIN, SPECULATIVE, Column, Measure, Row, prepare, read_sets, report, table_of
from service.bench.speed import CAPTION, COLUMNS, contestants_of, measured, summary_of
from service.conditions import Conditions, conditions_of
from service.config import LoadedConfig, ServiceConfig
from service.engine.requests import GenerationRequest, SamplingParams
from service.engine.weights import EMBEDDED_NAME, gguf_file, resolve
from service.errors import StartupError

PeerName = Literal["transformers", "llama.cpp", "llama.cpp-lookup"]


class TransformersPeer:
    """Hugging Face `generate` with its own model code, attention and cache."""

    def __init__(self, assembly: Assembly) -> None:
        self.conditions: Conditions = {}
        config = assembly.config
        file = gguf_file(config.model_source)
        model = AutoModelForCausalLM.from_pretrained(
            resolve(config.model_source) if file is None else file.parent,
            gguf_file=None if file is None else file.name,
            revision=config.revision or "main",
            dtype=assembly.loaded.model.dtype,
            use_safetensors=True,
            trust_remote_code=False,
        )
        self._model = model.eval().requires_grad_(False).to(assembly.target.device)
        # Its own defaults (sampling, end of text) would win over anything left unset in a call.
        self._model.generation_config = GenerationConfig(pad_token_id=0)

    @staticmethod
    def refuse(config: ServiceConfig, concurrency: int) -> None:
        """Do nothing: it runs every model."""

    @torch.inference_mode()
    def __call__(self, requests: Sequence[GenerationRequest]) -> Run:
        """Answer all requests in one batch."""
        start, params = time.perf_counter(), requests[0].sampling
        prompts = [torch.tensor(request.prompt, device=self._model.device) for request in requests]
        tokens = pad_sequence(prompts, batch_first=True, padding_side="left")  # [batch, length]
        mask = pad_sequence([torch.ones_like(prompt) for prompt in prompts], batch_first=True, padding_side="left")
        torch.manual_seed(params.seed)
        sampled = {"do_sample": True, "temperature": params.temperature, "top_k": 0, "top_p": 1.0}
        how = sampled if params.temperature else {"do_sample": False}
        config = GenerationConfig(max_new_tokens=params.max_tokens, pad_token_id=0, **how)
        output = self._model.generate(tokens, attention_mask=mask, generation_config=config)
        assert isinstance(output, Tensor)
        return _run(output[:, tokens.shape[1] :].tolist(), start)


def open_llama_cpp(file: Path, context: int, **more: Any) -> tuple[Any, Any]:
    """Open a GGUF file in llama.cpp with as many threads as torch has; return the package and its `Llama`.

    `more`: options of that class. Raises StartupError without the package."""
    if importlib.util.find_spec("llama_cpp") is None:
        raise StartupError("--peer llama.cpp needs a package that is not here: pip install llama-cpp-python")
    import llama_cpp

    threads = threads_in_use()
    options = {"n_threads": threads, "n_threads_batch": threads, "n_gpu_layers": 0, "verbose": False, **more}
    return llama_cpp, llama_cpp.Llama(str(file), n_ctx=context, **options)


class LlamaCppPeer:
    """llama.cpp on the same GGUF file, with as many threads and its own f16 cache."""

    def __init__(self, assembly: Assembly, **more: Any) -> None:
        """`more`: options of `Llama`."""
        file = _gguf_of(assembly.config)
        self._library, self._llama = open_llama_cpp(file, assembly.limits.max_model_len, **more)
        self.conditions: Conditions = {
            "llama_cpp_python": importlib.metadata.version("llama_cpp_python"),
            "llama_cpp_system_info": self._library.llama_print_system_info().decode().strip(),
            "llama_cpp_threads": threads_in_use(),
            "llama_cpp_weights": file.name,
        }

    @staticmethod
    def refuse(config: ServiceConfig, concurrency: int) -> None:
        """Raise StartupError unless there is the package, a GGUF file and a CPU, and one request at a time."""
        if importlib.util.find_spec("llama_cpp") is None:
            raise StartupError("--peer llama.cpp needs a package that is not here: pip install llama-cpp-python")
        if concurrency > 1:
            raise StartupError("--peer llama.cpp answers one request at a time: give --concurrency 1")
        if device_of(config.device).type != "cpu":
            raise StartupError("--peer llama.cpp runs on the CPU: give --device cpu, so that ours does too")
        _gguf_of(config)

    def __call__(self, requests: Sequence[GenerationRequest]) -> Run:
        """Answer one request, from an empty cache."""
        (request,), start = requests, time.perf_counter()
        return _run([self._answer(request.prompt, request.sampling)], start)

    def _answer(self, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        """Generate with the C functions: the package's own loop copies all logits to Python for each token."""
        library, context = self._library, self._llama.ctx
        library.llama_memory_clear(library.llama_get_memory(context), False)
        sampler, answer = self._sampler(params), list[int]()
        for first in range(0, len(prompt), self._llama.n_batch):
            self._decode(prompt[first : first + self._llama.n_batch])
        while True:
            answer.append(library.llama_sampler_sample(sampler, context, -1))
            if len(answer) == params.max_tokens:
                library.llama_sampler_free(sampler)
                return answer
            self._decode(answer[-1:])

    def _decode(self, tokens: Sequence[int]) -> None:
        """Append tokens to the cache, and compute the last one's logits."""
        array = (self._library.llama_token * len(tokens))(*tokens)
        if self._library.llama_decode(self._llama.ctx, self._library.llama_batch_get_one(array, len(tokens))):
            raise RuntimeError("llama.cpp could not decode")

    def _sampler(self, params: SamplingParams) -> Any:
        """Return a sampler that is greedy, or draws from the whole distribution at the request's temperature."""
        library = self._library
        chain = library.llama_sampler_chain_init(library.llama_sampler_chain_default_params())
        if params.temperature:
            library.llama_sampler_chain_add(chain, library.llama_sampler_init_temp(params.temperature))
            library.llama_sampler_chain_add(chain, library.llama_sampler_init_dist(params.seed))
        else:
            library.llama_sampler_chain_add(chain, library.llama_sampler_init_greedy())
        return chain


class LlamaCppLookupPeer(LlamaCppPeer):
    """llama.cpp with the prompt lookup of its package, and as many tokens as that advises for CPUs."""

    def __init__(self, assembly: Assembly) -> None:
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        super().__init__(assembly, draft_model=LlamaPromptLookupDecoding(num_pred_tokens=_LOOKUP), logits_all=True)
        self.conditions = {**self.conditions, "llama_cpp_lookup_tokens": _LOOKUP}

    def _answer(self, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        self._llama.reset()
        tokens = self._llama.generate(
            list(prompt), temp=params.temperature, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0
        )
        return list(islice(tokens, params.max_tokens))


_LOOKUP = 2

PEERS: Mapping[PeerName, type[TransformersPeer] | type[LlamaCppPeer]] = {
    "transformers": TransformersPeer,
    "llama.cpp": LlamaCppPeer,
    "llama.cpp-lookup": LlamaCppLookupPeer,
}


def run(
    loaded: LoadedConfig,
    prompts: PromptFiles,
    peer: Annotated[
        PeerName, typer.Option(help="Hugging Face generate, or llama.cpp (llama-cpp-python) on the same GGUF file.")
    ],
    more_prompts: MorePromptFiles = None,
    limit: Limit = None,
    temperature: Temperatures = [0.0],  # noqa: B006  # read as a signature, never changed
    max_tokens: AnswerTokens = 128,
    concurrency: Concurrency = 1,
    seed: Seed = 0,
    out: Out = None,
) -> bool:
    """Compare plain and speculative decoding and another engine on the same prompts, in turn. Exit code 1 if any token
    of speculative decoding differs from plain decoding."""
    kind = PEERS[peer]
    kind.refuse(loaded.config, concurrency)
    measures = [Measure(value, max_tokens, concurrency, seed) for value in dict.fromkeys(temperature)]
    assembly = prepare(loaded.config, out)
    sets = read_sets(assembly, [*prompts, *(more_prompts or [])], limit, max_tokens)
    engine = kind(assembly)
    rows = measured(sets, {**contestants_of(assembly), peer: engine}, measures)
    ratios = {ours: partial(_over_peer, peer, ours) for ours in (PLAIN, SPECULATIVE)}
    means = {ours: geometric_mean(map(over, rows)) for ours, over in ratios.items()}
    columns: list[Column] = [(peer, lambda row: f"{row['tokens_per_second'][peer]:.1f}")]
    columns += ((f"{ours} / {peer}", partial(_cell, over)) for ours, over in ratios.items())
    table = table_of([*COLUMNS, *columns], rows, caption=CAPTION, section=lambda row: row["temperature"])
    conditions = {**conditions_of(assembly), **engine.conditions}
    return report(conditions, out, rows, {**summary_of(rows), f"over_{peer}": means}, table)


def _over_peer(peer: str, ours: str, row: Row) -> float:
    return float(row["tokens_per_second"][ours] / row["tokens_per_second"][peer])


def _cell(ratio: Callable[[Row], float], row: Row) -> str:
    return f"{ratio(row):.2f}"


def _gguf_of(config: ServiceConfig) -> Path:
    """Return the GGUF file of the model. Raises StartupError for another model."""
    file = gguf_file(config.model_source)
    if file is None:
        raise StartupError(
            f"--peer llama.cpp reads GGUF files, but the model is {config.model}: "
            f"give --model FILE.gguf or --model {EMBEDDED_NAME}"
        )
    return file


def _run(answers: Sequence[Sequence[int]], start: float) -> Run:
    """Return a run that ends now, of answers by request; `start` is a reading of the performance counter."""
    seconds = time.perf_counter() - start
    return Run(tuple(Answer(tuple(answer), "", "length") for answer in answers), (), seconds)
