"""Calls of tools as grammars: what a format's own parser reads, with arguments by their schema."""
