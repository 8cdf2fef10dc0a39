"""A state kind from outside: the tail of a short convolution, with its layer and its family."""
