"""Clients of any server that speaks OpenAI's HTTP protocol."""
