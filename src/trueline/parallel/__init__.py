"""Ranks and their collectives."""
