#!/usr/bin/env python3
"""Sends requests made from the OpenAPI document to a control plane, with Schemathesis and a fixed seed. An answer that
is a 5xx, or that differs from the document, fails. Exits with 1 then.

Arguments: the binary `switchyard`, and optionally a seed. Needs the packages in requirements.txt.
"""

import json
import os
import pathlib
import secrets
import subprocess
import sys
import tempfile
import urllib.request

WAIT_SECONDS = 30
RUN_SECONDS = 120
CHECKS = [
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "ignored_auth",
]
MODEL = {
    "fingerprint": "0123456789abcdef",
    "architecture": "qwen3_moe",
    "hidden": 256,
    "moe_layers": [0, 1],
    "num_experts": 8,
    "top_k": 2,
}


class ControlPlane:
    """A control plane with a token, long leases, and no limit on rates."""

    def __init__(self, binary: str):
        self.token = secrets.token_hex(16)
        options = ["--listen", "127.0.0.1:0", "--placement", "load", "--lease-ttl-ms", "3600000", "--json"]
        rates = ["--rate-address", "0", "--rate-identity", "0", "--rate-member", "0"]
        # What this process inherits must not change the answers.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("SWITCHYARD_")}
        self.process = subprocess.Popen(
            [binary, "control-plane", "--exit-with-parent", *options, *rates],
            env={**inherited, "SWITCHYARD_TOKEN": self.token, "SWITCHYARD_LOG": "error"},
            stdout=subprocess.PIPE,
            text=True,
        )
        line = self.process.stdout.readline()
        if not line:
            sys.exit("error: the control plane has ended before it listened")
        self.url = f"http://{json.loads(line)['addr']}"

    def register(self, name: str) -> str:
        """Registers a member and returns its identity."""
        body = {"name": name, "data_addr": "127.0.0.1:7000", "incarnation": 2**64 - 1, "model": MODEL}
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/members", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as response:
            return json.load(response)["member_id"]

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(WAIT_SECONDS)


def check(plane: ControlPlane, seed: str, folder: str, config: str, *options: str) -> bool:
    path = pathlib.Path(folder) / "schemathesis.toml"
    # In a file, because other users of the host can see arguments.
    path.write_text(f'[headers]\nAuthorization = "Bearer {plane.token}"\n{config}')
    program = pathlib.Path(sys.executable).with_name("st")
    command = [program, "--config-file", path, "run", f"{plane.url}/openapi.json", "--seed", seed, "--no-color"]
    # A watch never ends.
    excluded = ["--exclude-path", "/v1/placement/watch"]
    checks = ["--checks", ",".join(CHECKS), "--phases", "examples,coverage,fuzzing", "--no-shrink"]
    bounds = ["--request-timeout", "10", "--generation-database", "none"]
    command = [*map(str, command), *excluded, *checks, *bounds, *options]
    return subprocess.run(command, cwd=folder, timeout=RUN_SECONDS, check=False).returncode == 0


def main() -> None:
    binary, *rest = sys.argv[1:]
    seed = rest[0] if rest else "1"
    plane = ControlPlane(os.path.abspath(binary))
    with tempfile.TemporaryDirectory() as folder:
        good = check(plane, seed, folder, "", "--max-examples", "20")
        # The identities above are made up. These requests are about a member that exists.
        member = plane.register("server-0")
        config = f'[parameters]\n"path.id" = "{member}"\n'
        about = ["--include-path-regex", "^/v1/members/", "--exclude-method", "DELETE"]
        good &= check(plane, seed, folder, config, *about, "--max-examples", "30")
        ended = plane.process.poll()
    plane.stop()
    if ended is not None:
        sys.exit(f"error: the control plane has ended with {ended}")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
