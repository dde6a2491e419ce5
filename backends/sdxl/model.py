"""Triton's side of the SDXL backend: requests in, responses out. The pipeline knows nothing of Triton.

execute(): a batch that Triton's dynamic batcher made --> Pipeline.run --> each answer as soon as its pictures are done
"""

import locale

# The embedded interpreter ignores LANG and would read files as ASCII.
locale.setlocale(locale.LC_CTYPE, "C.UTF-8")

import logging  # noqa: E402
import os  # noqa: E402
from typing import Any  # noqa: E402

import tensors  # noqa: E402
import triton_python_backend_utils as pb_utils  # noqa: E402


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        return tensors.complete(auto_complete_model_config)

    def initialize(self, args: dict[str, str]) -> None:
        # OpenMP's threads wait for each other in a busy loop; when anything else runs on the machine, such as another
        # model, that made a step ten times slower. Read once, when torch is loaded.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        # Here and not above: Triton starts this file once more, only to complete config.pbtxt, in a process where half
        # of pb_utils is missing and nothing needs torch.
        from worker import Worker

        _log_through_triton()
        self._worker = Worker(args)

    def execute(self, requests: list[Any]) -> None:
        self._worker.execute(requests)


def _log_through_triton() -> None:
    levels = {logging.DEBUG: "log_verbose", logging.INFO: "log_info", logging.WARNING: "log_warn"}

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            write = getattr(pb_utils.Logger, levels.get(record.levelno, "log_error"))
            write(f"[sdxl] {self.format(record)}")

    logging.basicConfig(handlers=[Handler()], level=logging.WARNING, force=True)
    logging.getLogger("pipeline").setLevel(logging.INFO)
