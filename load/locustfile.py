"""Load on a served model, with Locust:

    .venv/bin/python -m locust -f load/locustfile.py LlmGrpcUser --model llm --users 64 --arrivals poisson:2 \\
        --requests 200 --headless --samples samples.jsonl

User classes: LlmGrpcUser (unless another is named), LlmHttpUser, SdxlGrpcUser and SdxlHttpUser; --host host:port of
their protocol. Without --headless Locust's web page starts and shows the run, on port 8089. --processes N, or --master
and --worker on several machines, share the one schedule. `--help` has all options.

With --arrivals the loop is open: requests are sent at their time, however many are under way, and there must be enough
users for that, or the run fails. Without, it is closed: --users requests are under way all the time.
"""

import sys
from pathlib import Path
from typing import Any

import gevent
import grpc.experimental.gevent  # type: ignore[import-untyped]
from locust import LoadTestShape, events

# At the end, for Locust takes its own entry from the front again.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from load import options
from load.lab import Lab
from load.users import LlmGrpcUser, LlmHttpUser, SdxlGrpcUser, SdxlHttpUser

__all__ = ["LlmGrpcUser", "LlmHttpUser", "SdxlGrpcUser", "SdxlHttpUser", "UntilAnswered"]

MOST_THREADS = 10_000


class UntilAnswered(LoadTestShape):
    """As many users as asked for until every request is answered. When requests arrive is the schedule's business."""

    use_common_options = True

    def tick(self) -> Any:
        return self.runner.environment.lab.tick()


@events.init_command_line_parser.add_listener
def add_options(parser: Any, **_: Any) -> None:
    options.add_to(parser)


@events.init.add_listener
def set_up(environment: Any, **_: Any) -> None:
    # Before any channel, and after Locust has made its processes: gRPC's threads don't survive a fork.
    grpc.experimental.gevent.init_gevent()
    # Under gevent each gRPC channel keeps a thread of this pool waiting. With gevent's 10, an eleventh user would wait
    # for ever; they are made as they are needed.
    gevent.get_hub().threadpool.maxsize = MOST_THREADS
    given = environment.parsed_options
    if not given.user_classes and not given.class_picker:
        environment.user_classes = [LlmGrpcUser]
    if len(environment.user_classes) > 1 and not given.class_picker:
        sys.exit("error: several user classes are named; allowed: one")
    given.num_users = given.num_users or 1
    given.spawn_rate = given.spawn_rate or given.num_users  # all at once
    environment.lab = Lab(environment)
