"""Layers, built from local specs: they compute what their rank holds, and never see how many
ranks there are."""
