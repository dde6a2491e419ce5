"""What can go wrong with a request, in the words its sender reads."""


class RequestError(Exception):
    """Ends one request. The adapter maps each subclass to one Triton status."""


class InvalidRequest(RequestError):
    """The request itself is wrong: names the field, the value and what is allowed."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        shown = repr(value)
        super().__init__(f"{field} is {shown if len(shown) <= 80 else shown[:77] + '...'}; allowed: {allowed}")
        self.field = field


class Cancelled(RequestError):
    """The sender gave up."""


class DeadlineExceeded(RequestError):
    """The time that the request allowed is over."""


class PipelineFailure(RequestError):
    """The model failed while it held the request; the request itself was fine."""


class ConfigError(Exception):
    """The model can't be loaded as configured: names the key, the value and what is allowed."""
