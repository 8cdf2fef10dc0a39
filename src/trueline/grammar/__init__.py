"""What an output may look like: JSON schemas, regular expressions, choices and grammars, as
grammars of llguidance. No torch, no model."""
