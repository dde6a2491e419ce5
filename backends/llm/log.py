"""Python's logging into Triton's log."""

import logging

import triton_python_backend_utils as pb_utils

LEVELS = {logging.DEBUG: "log_verbose", logging.INFO: "log_info", logging.WARNING: "log_warn"}


def through_triton(backend: str) -> None:
    """`backend`: the name that config.pbtxt calls this backend by; each line begins with it."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            write = getattr(pb_utils.Logger, LEVELS.get(record.levelno, "log_error"))
            write(f"[{backend}] {self.format(record)}")

    logging.basicConfig(handlers=[Handler()], level=logging.WARNING, force=True, format="%(message)s")
    logging.getLogger("engine").setLevel(logging.INFO)
    logging.getLogger("requests").setLevel(logging.DEBUG)
