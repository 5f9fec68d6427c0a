"""The commands of the tutorial run as they stand, but for ports and folders."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import harness
import pytest

from switchyard_moe._binary import find_binary

PAGE = harness.ROOT / "docs/tutorial-engines.md"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.long
def test_the_tutorial_runs(tmp_path: Path) -> None:
    script = "\n".join(re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE))
    # The wheel is installed, and the test must not wait for ever for a server that ended.
    install = 'pip install "$(cargo xtask wheel --dev | tail -n 1)"\n'
    assert install in script
    script = script.replace(install, "")
    script = script.replace("kill -0 $vllm || break", "kill -0 $vllm || exit 1")
    for port in ("7070", "7171", "7172", "8000"):
        script = script.replace(port, str(free_port()))
    script = script.replace("/tmp/", f"{tmp_path}/")
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "switchyard").symlink_to(find_binary())
    (programs / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (programs / "python").chmod(0o755)
    log = tmp_path / "log"
    with log.open("w") as output:
        shell = subprocess.Popen(
            ["bash", "-u", "-c", script],
            cwd=harness.ROOT,
            env=harness.environment(PATH=f"{programs}{os.pathsep}{os.environ['PATH']}"),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            shell.wait(harness.TIMEOUT)
        finally:
            # The shell is the leader of the session, so every process of the tutorial is in its group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
    text = log.read_text(errors="replace")
    assert "the same answer" in text, text[-4000:]
    assert (tmp_path / "first").stat().st_size > 1000
