"""What a server in front of an engine costs: the same prompts offline and
through HTTP, alternately."""
