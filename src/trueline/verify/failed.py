from trueline.errors import TruelineError


class CheckFailed(TruelineError):
    """A check that went red, with its evidence."""

    exit_code = 1
