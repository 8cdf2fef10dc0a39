"""Chat formats: how models write reasoning and calls, and the parsers that read them."""
