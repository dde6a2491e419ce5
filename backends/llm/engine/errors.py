"""What can go wrong with a request, in the words its sender reads."""


class RequestError(Exception):
    """Ends one request. The adapter maps each subclass to one Triton status."""


class InvalidRequest(RequestError):
    """The request itself is wrong: names the field, the value and what is allowed."""


class QueueFull(RequestError):
    """No room to wait in: the same request may succeed later."""


class Cancelled(RequestError):
    """The sender gave up."""


class EngineFailure(RequestError):
    """The engine failed while it held the request; the request itself was fine."""


class ConfigError(Exception):
    """The model can't be loaded as configured: names the key, the value and what is allowed."""
