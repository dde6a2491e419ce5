"""What can go wrong with a request, in the words its sender reads."""


class RequestError(Exception):
    """Ends one request. The adapter maps each subclass to one Triton status."""


class InvalidRequest(RequestError):
    """The request itself is wrong: names the field, the value and what is allowed."""


class QueueFull(RequestError):
    """No room to wait in: the same request may succeed later."""


class TimedOut(RequestError):
    """It did not get a seat, or was not done, in the time that it gave itself."""


class Cancelled(RequestError):
    """The sender gave up."""


class EngineFailure(RequestError):
    """The engine failed while it held the request; the request itself was fine."""


def shown(value: object) -> str:
    """A value as it stands in an error message: as much of it as a person needs to know it again."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"


class ConfigError(Exception):
    """The model can't be loaded as configured: names the key, the value and what is allowed."""
