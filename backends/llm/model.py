"""Triton's entry to the LLM backend. Light on purpose: Triton also imports it just to complete a config.pbtxt."""

import locale

# The embedded interpreter ignores LANG and would read files as ASCII.
locale.setlocale(locale.LC_CTYPE, "C.UTF-8")

import json  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import schema  # noqa: E402
import triton_python_backend_utils as pb_utils  # noqa: E402


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        return schema.complete(auto_complete_model_config)

    def initialize(self, args: dict[str, str]) -> None:
        import log
        import vllm_arguments
        from engine.config import EngineConfig
        from engine.errors import ConfigError

        model_config = json.loads(args["model_config"])
        log.through_triton(model_config["backend"])
        if missing := schema.missing(model_config):
            raise pb_utils.TritonModelException(
                f"config.pbtxt lacks the inputs {', '.join(missing)}, which this backend adds itself; "
                "start Triton without --disable-auto-complete-config"
            )
        directory = Path(args["model_repository"])
        max_batch_size = model_config["max_batch_size"]
        self._to_completion = max_batch_size > 0
        try:
            path, reports_metrics = directory / args["model_version"] / "model.json", True
            if model_config["backend"] == "vllm":  # scripts/serve --as-vllm
                import torch

                config, reports_metrics = vllm_arguments.read(
                    path, model_config["parameters"], on_gpu=torch.cuda.is_available()
                )
            else:
                config = EngineConfig.from_file(path)
            config = config.resolved(directory.parent)
            if max_batch_size > config.max_num_seqs:
                raise ConfigError(
                    f"max_batch_size is {max_batch_size} in config.pbtxt; allowed: at most the {config.max_num_seqs} "
                    "seats of max_num_seqs in model.json"
                )
            from adapter import Adapter  # only now: it takes torch and seconds

            self._adapter = Adapter(
                config,
                {"model": args["model_name"], "version": args["model_version"]},
                batched=self._to_completion,
                reports_metrics=reports_metrics,
            )
        except ConfigError as error:
            raise pb_utils.TritonModelException(str(error)) from error

    def execute(self, requests: list[Any]) -> None:
        """Takes requests in. With a batch size, Triton makes the batches, and gets to send the next one only when the
        longest answer of this one is done: what comes meanwhile is Triton's queue to hold, limit and time out."""
        for request in requests:
            self._adapter.accept(request)
        if self._to_completion:
            self._adapter.wait_until_idle()

    def is_ready(self) -> bool:
        """Asked by Triton from 26.03 on; before that a failed engine answers every request with an error."""
        return self._adapter.is_healthy

    def finalize(self) -> None:
        """Called once every request has had its final response."""
        self._adapter.close()
