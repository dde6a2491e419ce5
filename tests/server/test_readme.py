"""README.md shows commands and their output; this is what they print."""

import re
import subprocess

from tests.server.tritonserver import ROOT, TritonServer

SHOWN = re.findall(r"```console\n\$ (.*?\}')\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_readmes_commands_print_what_it_shows(llm_server: TritonServer) -> None:
    assert len(SHOWN) == 5
    for command, output in SHOWN:
        done = subprocess.run(
            ["bash", "-c", command.replace("localhost:8000", llm_server.http)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.stdout.strip() == output.strip(), command
