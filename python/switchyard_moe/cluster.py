"""A control plane and expert servers as child processes, for tests and notebooks."""

from __future__ import annotations

import atexit
import contextlib
import http.client
import json
import os
import queue
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import urllib.request
import weakref
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from switchyard_moe._binary import find_binary
from switchyard_moe._client import Client
from switchyard_moe._errors import ClosedError, ClusterError, ConfigError, ForkedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from typing_extensions import Self, Unpack

    from switchyard_moe._client import Settings

__all__ = ["LocalCluster"]


class LocalCluster:
    """A control plane and some expert servers on this host.

    Every process runs the ``switchyard`` binary of this installation, listens on a free port of 127.0.0.1, and ends
    with this process at the latest. The constructor returns once every expert has its replicas::

        with switchyard_moe.LocalCluster("data/tiny-moe") as cluster:
            client = cluster.client()

    :param model: folder of a checkpoint, in the layout of the Hugging Face Hub.
    :param servers: number of expert servers, named ``server-0``, ``server-1`` and so on.
    :param replicas: servers that hold each expert. Default: 2, or 1 if there is one server only.
    :param threads: compute threads of each server. 0 takes one per CPU.
    :param devices: device of each server, ``cpu`` or ``cuda:N``, from the first server again if there are fewer than
        servers. Default: all on processors. Clients of servers on GPUs need a ``device`` as well.
    :param env: more environment variables for the servers.
    :param server_args: more arguments for each server, see ``switchyard expert-server --help``.
    :param control_plane_args: more arguments for the control plane, see ``switchyard control-plane --help``.
    :param lease_ttl: seconds after which the control plane removes a server that does not renew its lease.
    :param timeout: longest time in seconds for one process to start, or to end when it is asked to.
    :param binary: path of the ``switchyard`` binary. Default: the one of this installation.

    :raises ConfigError: an argument is out of range, or there is no binary.
    :raises ClusterError: a process ended, or did not start within ``timeout``. The text quotes its output.
    """

    url: str
    """URL of the control plane. It stays the same when the control plane restarts."""
    token: str
    """Secret of the cluster."""
    names: list[str]
    """Names of the servers, running or not."""

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        servers: int = 2,
        replicas: int | None = None,
        threads: int = 1,
        devices: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        server_args: Sequence[str] = (),
        control_plane_args: Sequence[str] = (),
        lease_ttl: float = 2.0,
        timeout: float = 60.0,
        binary: str | os.PathLike[str] | None = None,
    ) -> None:
        if servers < 1:
            raise ConfigError(f"servers is {servers}, expected at least 1")
        if replicas is None:
            replicas = min(2, servers)
        if not 1 <= replicas <= servers:
            raise ConfigError(f"replicas is {replicas}, expected 1 to {servers}, the number of servers")
        if lease_ttl < 0.1:
            raise ConfigError(f"lease_ttl is {lease_ttl} s, expected at least 0.1 s")
        if threads < 0:
            raise ConfigError(f"threads is {threads}, expected 0 for one per CPU, or more")
        if not timeout > 0:
            raise ConfigError(f"timeout is {timeout} s, expected more than 0")
        self.model = os.fspath(model)
        self.names = [f"server-{idx}" for idx in range(servers)]
        self.token = secrets.token_hex(16)
        self.url = ""
        self._binary = os.fspath(binary) if binary is not None else find_binary()
        self._env = dict(env or {})
        self._server_args = list(server_args)
        self._control_plane_args = list(control_plane_args)
        self._threads = threads
        self._devices = {name: devices[idx % len(devices)] for idx, name in enumerate(self.names) if devices}
        self._replicas = replicas
        self._lease_ttl_ms = round(lease_ttl * 1000)
        self._timeout = timeout
        self._address = "127.0.0.1:0"
        self._processes = _Processes()
        self._metrics: dict[str, str] = {}
        self._closed = False
        weak = weakref.WeakMethod(self.close)
        self._at_exit = _at_exit(weak)
        try:
            self.start_control_plane()
            for name in self.names:
                self._start(name)
            for name in self.names:
                # No server serves before all have registered, so the end of any process is the cause of the wait.
                self._wait_serving(name, self._processes.check)
        except BaseException:
            self.close()
            raise

    def client(
        self,
        *,
        ready_timeout: float | None = None,
        model: str | os.PathLike[str] | None = None,
        **settings: Unpack[Settings],
    ) -> Client:
        """Return a client that is connected with a live replica of every expert.

        Only processes that run count: a server that was killed before this call does not.

        :param ready_timeout: longest time in seconds until it is. Default: the cluster's ``timeout``.
        :param model: as for :class:`Client`. Default: the cluster's model.
        :param settings: more arguments of :class:`Client`.
        """
        self._check_open()
        client = Client(self.url, token=self.token, model=self.model if model is None else model, **settings)
        deadline = time.monotonic() + (self._timeout if ready_timeout is None else ready_timeout)
        try:
            while True:
                before = self._processes.pids()
                client.wait_ready(max(deadline - time.monotonic(), 0.0))
                # A server may have ended since the client looked at it.
                if self._processes.pids() == before:
                    return client
        except BaseException:
            client.close()
            raise

    @property
    def running(self) -> list[str]:
        """Names of the servers that run."""
        return [name for name in self.names if self._processes.is_running(name)]

    def pid(self, name: str) -> int:
        """Return the process id of a running server, or of ``control-plane``."""
        return self._process(name).pid

    def output(self, name: str) -> list[str]:
        """Return the last lines that a server, or ``control-plane``, wrote to standard error. At most 200."""
        return self._processes.output(name)

    def kill(self, name: str) -> None:
        """Kill a server with SIGKILL and wait for its end. Its calls go on at replicas.

        :meth:`Client.wait_ready` of a client of this host does not count the server from here on. The control plane
        names it as a replica until its lease ends, ``lease_ttl`` at most.
        """
        self._check_name(name)
        self._process(name).kill(self._timeout)

    def freeze(self, name: str) -> None:
        """Stop the threads of a server with SIGSTOP, and wait until all have stopped.

        Its connections stay open, and it answers nothing.

        :raises ClusterError: it ends, or a thread still runs after the cluster's timeout.
        """
        self._check_name(name)
        process = self._process(name)
        process.signal(signal.SIGSTOP)
        deadline = time.monotonic() + self._timeout
        # The thread that takes the signal may be the last to get a processor.
        while not process.has_stopped():
            if not process.is_running():
                process.raise_early_end()
            if time.monotonic() >= deadline:
                raise ClusterError(f"{name} still runs {self._timeout} s after SIGSTOP")
            time.sleep(0.001)

    def thaw(self, name: str) -> None:
        """Let a frozen server go on."""
        self._check_name(name)
        self._process(name).signal(signal.SIGCONT)

    def drain(self, name: str) -> None:
        """Ask a server with SIGTERM to leave, and wait until it has ended.

        :raises ClusterError: it does not end within the cluster's timeout, or ends with an error.
        """
        self._check_name(name)
        process = self._process(name)
        process.signal(signal.SIGTERM)
        code = process.wait(self._timeout)
        if code != 0:
            raise ClusterError(f"{name} ended with exit code {code}{process.quote()}")

    def restart(self, name: str) -> None:
        """Start a server again, after killing it if it runs, and wait until it serves its experts.

        Other servers may be dead. Clients may not have connected with the server yet: :meth:`wait_connected` waits for
        them.

        :raises ClusterError: the control plane does not run, or the server ends or does not serve within the
            cluster's timeout.
        """
        self._check_open()
        self._check_name(name)
        if not self._processes.is_running(CONTROL_PLANE):
            raise ClusterError(f"{name} cannot register, because the control plane is not running: start it first")
        if self._processes.is_running(name):
            self.kill(name)
        self._start(name)
        self._wait_serving(name, lambda: None)

    def wait_connected(self, name: str, connections: int = 1) -> None:
        """Wait until clients have at least ``connections`` connections with a server. A client has one for each lane.

        A client that is not connected with a restarted server cannot find it without the control plane.

        :raises ClusterError: the server ends, or has fewer within the cluster's timeout.
        """
        self._check_name(name)
        process = self._process(name)
        deadline = time.monotonic() + self._timeout
        while (found := self._num_links(name)) < connections:
            if not process.is_running():
                process.raise_early_end()
            if time.monotonic() >= deadline:
                text = f"{name} has {found} of {connections} connections after {self._timeout} s{process.quote()}"
                raise ClusterError(text)
            time.sleep(0.05)

    def stop_control_plane(self) -> None:
        """Kill the control plane with SIGKILL. Clients and servers go on with the placement that they know."""
        self._process(CONTROL_PLANE).kill(self._timeout)

    def start_control_plane(self) -> None:
        """Start the control plane, on the same port as before. It remembers members and placement."""
        self._check_open()
        if self._processes.is_running(CONTROL_PLANE):
            raise ClusterError("the control plane is running already: stop it first")
        arguments = ["control-plane", "--listen", self._address, "--servers", str(len(self.names))]
        arguments += ["--replicas", str(self._replicas), "--lease-ttl-ms", str(self._lease_ttl_ms)]
        arguments += ["--data-dir", str(self._processes.folder / CONTROL_PLANE)]
        process = self._spawn(CONTROL_PLANE, arguments + self._control_plane_args, {})
        event = process.wait_event("listening", self._timeout, lambda: None)
        self._address = str(event["addr"])
        self.url = f"http://{self._address}"

    def close(self) -> None:
        """Kill every process and remove the temporary folder. Further calls do nothing."""
        self._closed = True
        self._processes.close()
        atexit.unregister(self._at_exit)

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # The constructor may have failed before there were processes.
        processes = getattr(self, "_processes", None)
        if processes is not None:
            processes.close()

    def __repr__(self) -> str:
        if self._closed:
            return "<switchyard_moe.LocalCluster, closed>"
        return f"<switchyard_moe.LocalCluster at {self.url}, running: {', '.join(self.running) or 'no server'}>"

    def _start(self, name: str) -> None:
        arguments = ["expert-server", "--model", self.model, "--name", name, "--control-plane", self.url]
        arguments += ["--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0", "--threads", str(self._threads)]
        if name in self._devices:
            arguments += ["--device", self._devices[name]]
        self._spawn(name, arguments + self._server_args, self._env)

    def _wait_serving(self, name: str, check: Callable[[], None]) -> None:
        process = self._processes.get(name)
        event = process.wait_event("listening", self._timeout, check)
        self._metrics[name] = str(event["metrics_addr"])
        process.wait_event("serving", self._timeout, check)

    def _num_links(self, name: str) -> int:
        try:
            with _DIRECT.open(f"http://{self._metrics[name]}/metrics", timeout=5.0) as response:
                lines = response.read().decode().splitlines()
        except (OSError, http.client.HTTPException):
            # The server is busy, or ends: the caller looks again.
            return 0
        return next((int(float(line.split()[-1])) for line in lines if line.startswith(LINKS + " ")), 0)

    def _spawn(self, name: str, arguments: list[str], env: Mapping[str, str]) -> _Process:
        # The token is in the environment, because other users of the host can see arguments.
        variables = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith("SWITCHYARD_") or key in KEPT_VARIABLES
        }
        variables |= {"SWITCHYARD_TOKEN": self.token, **env}
        return self._processes.spawn(name, [self._binary, *arguments, "--json", "--exit-with-parent"], variables)

    def _process(self, name: str) -> _Process:
        self._check_open()
        return self._processes.running(name)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this cluster is closed: make a new one")
        owner = self._processes.owner
        if os.getpid() != owner:
            raise ForkedError(f"this cluster belongs to process {owner}, which process {os.getpid()} was forked off")

    def _check_name(self, name: str) -> None:
        if name not in self.names:
            raise ConfigError(f"no server is named {name!r}, expected one of {', '.join(self.names)}")


class _Process:
    """A child process, with the events of its standard output and the tail of its standard error."""

    def __init__(self, name: str, child: subprocess.Popen[str]) -> None:
        self.name = name
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._child = child
        self._events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._readers = [
            threading.Thread(target=self._read_events, name=f"switchyard-{name}-out", daemon=True),
            threading.Thread(target=self._read_errors, name=f"switchyard-{name}-err", daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        return self._child.pid

    def is_running(self) -> bool:
        return self._child.poll() is None

    def has_stopped(self) -> bool:
        """Return whether no thread runs, as after SIGSTOP."""
        # The state follows the name, which is in parentheses and may hold any character.
        try:
            stats = [path.read_text(errors="replace") for path in Path(f"/proc/{self.pid}/task").glob("*/stat")]
        except OSError:
            # A thread has ended meanwhile.
            return False
        return bool(stats) and all(stat.rpartition(") ")[2].startswith("T") for stat in stats)

    def signal(self, number: signal.Signals) -> None:
        self._child.send_signal(number)

    def kill(self, timeout: float) -> None:
        self._child.kill()
        self.wait(timeout)

    def wait(self, timeout: float) -> int:
        try:
            return self._child.wait(timeout)
        except subprocess.TimeoutExpired:
            raise ClusterError(f"{self.name} is still running after {timeout} s{self.quote()}") from None

    def wait_event(self, wanted: str, timeout: float, check: Callable[[], None]) -> dict[str, Any]:
        """Wait for an event. Calls ``check`` meanwhile."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                event = self._events.get(timeout=0.05)
            except queue.Empty:
                check()
                if time.monotonic() >= deadline:
                    text = f"{self.name} did not report {wanted!r} within {timeout} s{self.quote()}"
                    raise ClusterError(text) from None
                continue
            if event is None:
                self.raise_early_end()
            elif event.get("event") == wanted:
                return event

    def raise_early_end(self) -> None:
        """Raise the error of a process that ended by itself."""
        code = self.wait(5.0)
        for reader in self._readers:
            reader.join(1.0)
        for line in reversed(self.tail):
            if line.startswith("error: "):
                raise ClusterError(f"{self.name}: {line.removeprefix('error: ')}")
        raise ClusterError(f"{self.name} ended with exit code {code} before it was ready{self.quote()}")

    def quote(self) -> str:
        """Return the last lines of standard error, as the end of an error message."""
        return f"; standard error: {' | '.join(list(self.tail)[-20:])}" if self.tail else ""

    def _read_events(self) -> None:
        stream = self._child.stdout
        assert stream is not None
        with stream:
            for line in stream:
                with contextlib.suppress(json.JSONDecodeError):
                    self._events.put(json.loads(line))
        self._events.put(None)

    def _read_errors(self) -> None:
        stream = self._child.stderr
        assert stream is not None
        with stream:
            for line in stream:
                self.tail.append(line.rstrip("\n"))


class _Processes:
    """The processes of a cluster, by name, and their temporary folder."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="switchyard-"))
        self._by_name: dict[str, _Process] = {}
        self.owner = os.getpid()
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # The kernel ties a child to the thread that starts it, and the caller's thread may end early.
        orders = self._orders
        self._launcher = threading.Thread(target=_launch, args=(orders,), name="switchyard-launcher", daemon=True)
        self._launcher.start()

    def spawn(self, name: str, arguments: list[str], env: Mapping[str, str]) -> _Process:
        answer: queue.SimpleQueue[subprocess.Popen[str] | OSError] = queue.SimpleQueue()

        def start() -> None:
            try:
                child = subprocess.Popen(
                    arguments,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="replace",
                    # Ctrl-C is for this process; it decides about its children.
                    start_new_session=True,
                )
            except OSError as error:
                answer.put(error)
            else:
                answer.put(child)

        self._orders.put(start)
        child = answer.get()
        if isinstance(child, OSError):
            raise ClusterError(f"{name} cannot be started from {arguments[0]}: {child}") from child
        process = _Process(name, child)
        self._by_name[name] = process
        return process

    def is_running(self, name: str) -> bool:
        process = self._by_name.get(name)
        return process is not None and process.is_running()

    def pids(self) -> dict[str, int]:
        """Return the process ids of what runs, by name."""
        return {name: process.pid for name, process in self._by_name.items() if process.is_running()}

    def get(self, name: str) -> _Process:
        process = self._by_name.get(name)
        if process is None:
            raise ClusterError(f"{name} was not started")
        return process

    def running(self, name: str) -> _Process:
        process = self.get(name)
        if not process.is_running():
            raise ClusterError(f"{name} is not running{process.quote()}")
        return process

    def output(self, name: str) -> list[str]:
        process = self._by_name.get(name)
        return [] if process is None else list(process.tail)

    def check(self) -> None:
        """Raise the error of the first process that ended."""
        for process in self._by_name.values():
            if not process.is_running():
                process.raise_early_end()

    def close(self) -> None:
        if os.getpid() != self.owner:
            return
        for process in self._by_name.values():
            with contextlib.suppress(ProcessLookupError):
                process.signal(signal.SIGKILL)
        for process in self._by_name.values():
            process.wait(10.0)
        self._by_name.clear()
        self._orders.put(None)
        shutil.rmtree(self.folder, ignore_errors=True)


def _launch(orders: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    """Run orders until ``None`` comes."""
    while (order := orders.get()) is not None:
        order()


def _at_exit(close: weakref.WeakMethod[Callable[[], None]]) -> Callable[[], None]:
    """Register a function that closes a cluster at the interpreter's end, if it still exists then."""

    def run() -> None:
        method = close()
        if method is not None:
            method()

    return atexit.register(run)


CONTROL_PLANE = "control-plane"
TAIL_LINES = 200
LINKS = "switchyard_server_links"
# Proxies of the environment are not for children on this host.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
KEPT_VARIABLES = ("SWITCHYARD_LOG", "SWITCHYARD_LOG_FORMAT")
