"""`python -m trueline.conformance`: pytest with the options and the checks."""

import sys

import pytest

from trueline import conformance

if __name__ == "__main__":
    checks = ["--pyargs", "trueline.conformance.test_replacement"]
    sys.exit(pytest.main([*checks, *sys.argv[1:]], plugins=[conformance]))
