"""Anthropic's Messages: read as a chat request, answered as blocks and events of their own."""
