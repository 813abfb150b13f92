"""The server: configuration, tokenizer, engine, HTTP interface and the wiring between them."""

__version__ = "0.3.0"
