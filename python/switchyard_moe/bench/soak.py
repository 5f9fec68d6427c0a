"""A vLLM server under streaming clients while expert servers are killed: counts failed requests and wrong tokens.

The program starts a cluster and ``vllm.entrypoints.openai.api_server`` with the interpreter that runs it. Each client
sends one request after the other over HTTP and reads the tokens as they come. A prompt's tokens are compared with a
reference: with ``--golden``, or else with the first answer, which is computed before any server is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import switchyard_moe

__all__ = ["Server", "Tally", "main", "soak"]

#: Seconds that the engine may take to start.
START_TIMEOUT = 600.0
#: Seconds that one request may stay without a token.
TOKEN_TIMEOUT = 120.0


class Server:
    """A vLLM server with the OpenAI API on a free port of 127.0.0.1, as a child process.

    ``arguments`` are more options of the server, ``env`` its environment. `wait` returns once it answers.
    """

    def __init__(self, model: str, arguments: Sequence[str], env: dict[str, str]) -> None:
        self.port = _free_port()
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115, closed by close()
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", "model", *arguments]
        self._child = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT
        )

    def wait(self, timeout: float = START_TIMEOUT) -> None:
        """Blocks until the server is healthy. Raises ClusterError with the end of its log if it is not in time."""
        deadline = time.monotonic() + timeout
        while True:
            if self._child.poll() is not None:
                raise switchyard_moe.ClusterError(f"vLLM ended with exit code {self._child.returncode}: {self.log()}")
            if time.monotonic() >= deadline:
                raise switchyard_moe.ClusterError(f"vLLM was not ready in {timeout:.0f} s: {self.log()}")
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5.0)
            with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            time.sleep(0.2)

    def stream(self, prompt: Sequence[int], tokens: int) -> Iterator[int]:
        """Yields the ids of a greedy completion as they come. Raises OSError or ValueError if the request fails."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TOKEN_TIMEOUT)
        body = {
            "model": "model",
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise ValueError(f"HTTP {response.status}: {response.read(2000)!r}")
            for line in response:
                if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                    continue
                event = json.loads(line[len(b"data: ") :])
                if "error" in event:
                    raise ValueError(str(event["error"]))
                for choice in event["choices"]:
                    yield from choice.get("token_ids") or ()

    def log(self, characters: int = 3000) -> str:
        """Returns the end of the server's output."""
        self._log.flush()
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), characters, max(0, size - characters)).decode(errors="replace")

    def close(self) -> None:
        """Ends the server and its workers. Waits up to 30 s before it kills them."""
        self._child.terminate()
        try:
            self._child.wait(30.0)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._log.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclasses.dataclass
class Tally:
    """Counts of a run."""

    requests: int = 0
    failed: int = 0
    tokens: int = 0
    wrong: int = 0
    kills: int = 0
    seconds: float = 0.0
    longest_gap: float = 0.0
    """Longest time in seconds between two tokens of a request."""
    errors: list[str] = dataclasses.field(default_factory=list)


def soak(
    server: Server,
    cluster: switchyard_moe.LocalCluster,
    prompts: Sequence[tuple[Sequence[int], Sequence[int] | None]],
    *,
    clients: int,
    seconds: float,
    kill_every: float,
    tokens: int = 64,
    say: Callable[[str], None] = lambda text: None,
) -> Tally:
    """Runs ``clients`` for ``seconds`` and kills one server of the cluster every ``kill_every`` seconds.

    ``prompts`` are pairs of a prompt and its expected ids, or None for the ids of a first answer. A killed server is
    started again at once, and the next one is killed only when it serves the engine, so every expert keeps a replica.
    """
    expected = [
        list(ids)[:tokens] if ids is not None else list(server.stream(prompt, tokens)) for prompt, ids in prompts
    ]
    tally, lock, end = Tally(), threading.Lock(), threading.Event()

    def client(number: int) -> None:
        turn = number
        while not end.is_set():
            which = turn % len(prompts)
            turn += 1
            found: list[int] = []
            gap, last, error = 0.0, time.monotonic(), ""
            try:
                for token in server.stream(prompts[which][0], tokens):
                    now = time.monotonic()
                    gap, last = max(gap, now - last), now
                    found.append(token)
            except (OSError, ValueError, http.client.HTTPException) as failure:
                error = f"{type(failure).__name__}: {failure}"
            wrong = sum(a != b for a, b in zip(found, expected[which], strict=False))
            if not error and len(found) != len(expected[which]):
                error = f"{len(found)} tokens, expected {len(expected[which])}"
            with lock:
                tally.requests += 1
                tally.tokens += len(found)
                tally.wrong += wrong
                tally.longest_gap = max(tally.longest_gap, gap)
                if error:
                    tally.failed += 1
                    tally.errors.append(error)

    threads = [threading.Thread(target=client, args=(number,), daemon=True) for number in range(clients)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    try:
        victim = 0
        next_kill = started + kill_every
        while (now := time.monotonic()) < started + seconds:
            if now < next_kill:
                time.sleep(min(0.1, next_kill - now))
                continue
            name = cluster.names[victim % len(cluster.names)]
            cluster.kill(name)
            tally.kills += 1
            victim += 1
            cluster.restart(name)
            cluster.wait_connected(name)
            next_kill = max(next_kill + kill_every, time.monotonic())
            say(f"{now - started:6.1f} s: killed {name}, {tally.requests} requests, {tally.failed} failed")
    finally:
        end.set()
        for thread in threads:
            thread.join(TOKEN_TIMEOUT + 10.0)
    tally.seconds = time.monotonic() - started
    if any(thread.is_alive() for thread in threads):
        tally.failed += 1
        tally.errors.append("a request did not end")
    return tally


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs from the command line. Returns 1 if a request failed or a token is wrong."""
    parser = argparse.ArgumentParser("python -m switchyard_moe.bench soak", description=__doc__)
    parser.add_argument("--model", required=True, help="folder of the checkpoint")
    parser.add_argument("--golden", type=Path, help="JSON: {prompts: [{ids, greedy_f32}]}, ids of prompt and answer")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--kill-every", type=float, default=5.0, help="seconds")
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--vllm", default="", help="more options of the vLLM server, separated by spaces")
    given = parser.parse_args(arguments)
    with switchyard_moe.LocalCluster(given.model, servers=given.servers) as cluster:
        env = {**os.environ, "SWITCHYARD_CONTROL_PLANE": cluster.url, "SWITCHYARD_TOKEN": cluster.token}
        options = ["--load-format", "switchyard", "--quantization", "switchyard", "--dtype", given.dtype]
        options += ["--max-num-seqs", str(given.clients), "--skip-tokenizer-init", *given.vllm.split()]
        with Server(given.model, options, env) as server:
            server.wait()
            tally = soak(
                server,
                cluster,
                _prompts(given.golden),
                clients=given.clients,
                seconds=given.minutes * 60.0,
                kill_every=given.kill_every,
                tokens=given.tokens,
                say=lambda text: print(text, file=sys.stderr, flush=True),
            )
    result: dict[str, Any] = dataclasses.asdict(tally)
    result["errors"] = result["errors"][:20]
    print(json.dumps(result))
    return int(tally.failed > 0 or tally.wrong > 0 or tally.requests == 0)


def _prompts(golden: Path | None) -> list[tuple[list[int], list[int] | None]]:
    if golden is None:
        return [([number + 1, 2 * number + 7, 11], None) for number in range(8)]
    rows = json.loads(golden.read_text())["prompts"]
    return [(row["ids"], row["greedy_f32"][len(row["ids"]) :]) for row in rows]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
