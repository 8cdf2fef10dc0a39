"""Between text and token ids: tokenizers, streaming text, stop strings, chat templates."""
