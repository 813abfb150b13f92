"""Serves another engine by the OpenAI protocol: `python rival_server.py ENGINE MODEL --port N --options JSON`.

Runs in an environment that has the engine, and nothing of this project. `benchmarks/rivals.py` starts it."""

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

Generate = Callable[["Asked", Callable[[str], None]], tuple[int, int]]
"""Answers a chat: calls the function with each piece of text; returns the tokens of the prompt and of the answer."""

CONTEXT = 2048  # tokens of a request


class Asked(NamedTuple):
    """What this server understands of a request; the end of text does not end an answer."""

    messages: list[dict[str, str]]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int

    @property
    def sampling(self) -> dict[str, Any]:
        """Options of `generate`, which are the same in transformers and in OpenVINO."""
        greedy = {"do_sample": False}
        drawn = {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p}
        return {**(drawn if self.temperature else greedy), "max_new_tokens": self.max_tokens}


def serve_llama_cpp(model: str, port: int, clients: int, options: dict[str, Any]) -> None:
    """Serve a GGUF file with the server of llama.cpp. Options are the kind of drafts and their attributes."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.port, params.hostnames = model, port, ["127.0.0.1"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(os.environ["OMP_NUM_THREADS"])
    params.cache_ram_mib, params.verbosity = 0, 1
    params.n_parallel, params.n_ctx = clients, CONTEXT * clients
    kind = options.pop("kind", "NONE")
    params.speculative.types = [getattr(xllamacpp.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{kind}")]
    for path, value in options.items():
        part, name = path.split(".")
        setattr(getattr(params.speculative, part), name, value)
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.pause()


def serve_vllm(model: str, port: int, clients: int, options: dict[str, Any]) -> None:
    """Become the server of vLLM. Options are those of its command line."""
    cores = sorted(os.sched_getaffinity(0))[: int(os.environ.pop("OMP_NUM_THREADS"))]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    libraries = [path for name in ("libiomp5.so", "libtcmalloc*.so*") for path in Path(sys.prefix, "lib").glob(name)]
    os.environ["LD_PRELOAD"] = ":".join(map(str, libraries))  # as its documentation asks for
    given = {"model": model, "host": "127.0.0.1", "port": port, "max-model-len": CONTEXT, "generation-config": "vllm"}
    given["max-num-batched-tokens"] = CONTEXT * clients  # it fails on a CPU when a seeded prompt is read in parts
    words = []
    for name, value in {**given, **options}.items():
        words += [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
    os.execv(sys.executable, [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words])


def serve_openvino(model: str, port: int, clients: int, options: dict[str, Any]) -> None:
    """Serve a GGUF file or a converted folder with OpenVINO GenAI, one request at a time. Options are those of each
    answer; `pipeline` holds those of the pipeline."""
    import openvino_genai

    properties = options.pop("pipeline", {})
    properties["INFERENCE_NUM_THREADS"] = int(os.environ["OMP_NUM_THREADS"])
    pipeline = openvino_genai.LLMPipeline(model, "CPU", **properties)
    tokenizer = pipeline.get_tokenizer()

    def generate(asked: Asked, emit: Callable[[str], None]) -> tuple[int, int]:
        prompt = tokenizer.apply_chat_template(asked.messages, add_generation_prompt=True)
        encoded = tokenizer.encode(prompt, add_special_tokens=False)
        config = openvino_genai.GenerationConfig(ignore_eos=True, **asked.sampling, **options)
        if asked.temperature:
            config.rng_seed = asked.seed
            config.top_k = asked.top_k or config.top_k
        done = pipeline.generate(encoded, config, emit)
        return encoded.input_ids.get_shape()[1], done.perf_metrics.get_num_generated_tokens()

    _serve(port, generate)


def serve_transformers(model: str, port: int, clients: int, options: dict[str, Any]) -> None:
    """Serve a folder with transformers, one request at a time. Options are those of each answer; `dtype` is the
    weights'."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, TextStreamer

    class Pieces(TextStreamer):
        emit: Callable[[str], None]

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            if text:
                self.emit(text)

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    tokenizer = AutoTokenizer.from_pretrained(model)
    dtype = options.pop("dtype", "float32")
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    loaded.generation_config = GenerationConfig(pad_token_id=0)

    def generate(asked: Asked, emit: Callable[[str], None]) -> tuple[int, int]:
        inputs = tokenizer.apply_chat_template(
            asked.messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        torch.manual_seed(asked.seed)
        streamer = Pieces(tokenizer, skip_prompt=True, skip_special_tokens=True)
        streamer.emit = emit
        how = {**asked.sampling, **({"top_k": asked.top_k} if asked.temperature else {}), **options}
        output = loaded.generate(**inputs, streamer=streamer, **how)
        count = inputs["input_ids"].shape[1]
        return count, output.shape[1] - count

    _serve(port, generate)


def _serve(port: int, generate: Generate) -> None:
    """Answer chats as streams of events, one at a time."""
    one_at_a_time = Lock()

    class Handler(BaseHTTPRequestHandler):
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self._begin("application/json")
            self.wfile.write(b'{"data": [{"id": "model"}]}')

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            given = {name: body[name] for name in Asked._fields if name in body}
            asked = Asked(**{"temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0, **given})
            self._begin("text/event-stream")
            with one_at_a_time:
                read, written = generate(asked, lambda piece: self._send({"choices": [{"delta": {"content": piece}}]}))
            usage = {"prompt_tokens": read, "completion_tokens": written}
            self._send({"choices": [], "usage": usage})

        def log_message(self, *args: object) -> None:
            """Log nothing."""

        def _begin(self, kind: str) -> None:
            self.send_response(200)
            self.send_header("content-type", kind)
            self.end_headers()

        def _send(self, event: dict[str, Any]) -> None:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self.wfile.flush()

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


ENGINES = {
    "llama.cpp": serve_llama_cpp,
    "openvino": serve_openvino,
    "transformers": serve_transformers,
    "vllm": serve_vllm,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--clients", type=int, default=1, help="requests in flight")
    parser.add_argument("--options", type=json.loads, default={})
    given = parser.parse_args()
    ENGINES[given.engine](given.model, given.port, given.clients, given.options)
