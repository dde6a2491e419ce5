"""The load lab's commands."""

import os
import sys
from pathlib import Path

USAGE = """Usage: scripts/load COMMAND [ARGUMENTS]; each COMMAND has a --help

  compare   starts a fresh server for each batching mode, sends all the same traffic, and writes tables and plots
  report    writes the report of a comparison anew, with another SLO perhaps
  advise    searches the settings with the highest goodput under an SLO on this machine, and prints the lines to paste
  soak      sends a server everything that goes wrong, for long, and checks that each request ends exactly once
  run       sends traffic to a server that runs: Locust with our users, on its web page, headless or distributed
"""


def main() -> int:
    command, arguments = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])
    if command == "run":
        file = Path(__file__).with_name("locustfile.py")
        os.execv(sys.executable, [sys.executable, "-m", "locust", "-f", str(file), *arguments])
    # Only now: an import that takes seconds is none of the others' business.
    if command == "compare":
        from load import compare

        return compare.main(arguments)
    if command == "report":
        from load import report

        return report.main(arguments)
    if command == "advise":
        from load import advise

        return advise.main(arguments)
    if command == "soak":
        from load import soak

        return soak.main(arguments)
    print(USAGE, file=sys.stdout if command in ("-h", "--help") else sys.stderr)
    return 0 if command in ("-h", "--help") else 2


if __name__ == "__main__":
    sys.exit(main())
