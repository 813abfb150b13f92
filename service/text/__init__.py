"""Text to tokens and back: tokenizer, chat template, tools and thoughts, JSON schemas and grammars."""
