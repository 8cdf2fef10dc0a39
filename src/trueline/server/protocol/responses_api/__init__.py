"""OpenAI's Responses: read as a chat request, answered as items and events of their own."""
