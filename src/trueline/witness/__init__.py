"""The built-in models as witnesses: what a wrong number costs, in right answers."""
