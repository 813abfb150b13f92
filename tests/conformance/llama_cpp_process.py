"""llama.cpp as a judge, in a process and environment of its own: scores of all positions, token ids, quantised rows.

The package's own interface gives the scores of one position a request; its library has all of llama.cpp's C functions.
Structures of options are kept as bytes, whose first fields are compared with what they are known to hold. Reads JSON by
lines, and answers each with a line.
"""

import ctypes
import importlib.util
import json
import os
import sys
from pathlib import Path

_POSITIONS, _BATCH = 512, 2048


class _Options(ctypes.Structure):
    """Options of a model or a context, longer than any version of llama.cpp makes them."""

    _fields_ = [("words", ctypes.c_uint32 * 256)]


class _Batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


_POINTERS = ("llama_model_load_from_file", "llama_init_from_model", "llama_model_get_vocab")
_RESULTS = {
    **dict.fromkeys(_POINTERS, ctypes.c_void_p),
    **dict.fromkeys(("llama_model_default_params", "llama_context_default_params"), _Options),
    "llama_batch_init": _Batch,
    "llama_get_logits": ctypes.POINTER(ctypes.c_float),
    "ggml_quantize_chunk": ctypes.c_size_t,
}


class LlamaCpp:
    """The library."""

    def __init__(self) -> None:
        found = importlib.util.find_spec("xllamacpp")
        assert found is not None
        assert found.origin is not None
        self._library = ctypes.CDLL(str(next(Path(found.origin).parent.glob("xllamacpp*.so"))))
        for name, result in _RESULTS.items():
            getattr(self._library, name).restype = result
        self._library.llama_backend_init()

    def model(self, file: str) -> ctypes.c_void_p:
        """Load a file. Raises ValueError where llama.cpp does not."""
        model = self._library.llama_model_load_from_file(os.fsencode(file), self._library.llama_model_default_params())
        if not model:
            raise ValueError("the file does not load")
        return ctypes.c_void_p(model)

    def logits(self, file: str, texts: list[list[int]], out: str) -> None:
        """Write the scores of all tokens after each position of each text. # [texts, positions, vocab] float32"""
        model = self.model(file)
        vocab = self._library.llama_vocab_n_tokens(ctypes.c_void_p(self._library.llama_model_get_vocab(model)))
        with Path(out).open("wb") as stream:
            for text in texts:
                stream.write(self._logits(model, text, vocab))
        self._library.llama_model_free(model)

    def _logits(self, model: ctypes.c_void_p, text: list[int], vocab: int) -> bytes:
        assert len(text) <= _POSITIONS
        llama, options = self._library, self._library.llama_context_default_params()
        assert list(options.words[:3]) == [_POSITIONS, _BATCH, _POSITIONS], "these are not the options we know"
        context = ctypes.c_void_p(llama.llama_init_from_model(model, options))
        if not context:
            raise ValueError("the model does not run")
        llama.llama_set_n_threads(context, 1, 1)
        batch = llama.llama_batch_init(len(text), 0, 1)
        batch.n_tokens = len(text)
        for at, token in enumerate(text):
            batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.logits[at] = token, at, 1, 1
            batch.seq_id[at][0] = 0
        status = llama.llama_decode(context, batch)
        assert status == 0
        found = ctypes.string_at(llama.llama_get_logits(context), 4 * len(text) * vocab)
        llama.llama_batch_free(batch)
        llama.llama_free(context)
        return found

    def token_ids(self, file: str, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, which has no control tokens."""
        llama, model, ids = self._library, self.model(file), list[list[int]]()
        vocab = ctypes.c_void_p(llama.llama_model_get_vocab(model))
        for text in texts:
            data = text.encode()
            buffer = (ctypes.c_int32 * (len(data) + 16))()
            count = llama.llama_tokenize(vocab, data, len(data), buffer, len(buffer), False, False)
            assert count >= 0, text
            ids.append(buffer[:count])
        llama.llama_model_free(model)
        return ids

    def quantise(self, kind: int, rows: int, columns: int, source: str, out: str) -> None:
        """Write a float32 matrix as blocks of a type of ggml's."""
        data = Path(source).read_bytes()
        into = ctypes.create_string_buffer(len(data))
        whole = ctypes.c_int64(0), ctypes.c_int64(rows), ctypes.c_int64(columns)
        size = self._library.ggml_quantize_chunk(kind, data, into, *whole, None)
        Path(out).write_bytes(into.raw[:size])


def main() -> None:
    """Answer each line until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # llama.cpp writes there
    judge = LlamaCpp()
    for line in sys.stdin:
        call, arguments = json.loads(line)
        try:
            answer: object = {"result": getattr(judge, call)(**arguments)}
        except ValueError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
