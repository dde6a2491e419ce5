"""Waiting for what another thread or process does."""

import time
from collections.abc import Callable


def wait_for(condition: Callable[[], bool], seconds: float = 20, pause: float = 0.05) -> None:
    """Fails when `condition` is not true within `seconds`; asks every `pause` seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(pause)
