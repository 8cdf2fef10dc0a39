"""Small, plausible mistakes in the source, each with the tests that must see it: `make mutants`."""
