"""What can go wrong, as types. The command line turns the first into exit code 2, the rest into 1."""


class CompressError(Exception):
    """Base of every error that llmcompress raises knowingly; its text is one sentence for the user."""

    exit_code = 1


class BadInput(CompressError):
    """The user gave something that can't be used; the text names the value and what would be accepted."""

    exit_code = 2


class NumericalFailure(CompressError):
    """NaN, Inf or a system without a solution; the text names the layer and the tensor."""


class CorruptOutput(CompressError):
    """A written checkpoint did not verify after it was reopened."""


class CantWrite(CompressError):
    """A disk is full or gone in the middle of a run; the text names the file and the reason."""
