#!/usr/bin/env python3
"""Cost of an encrypted tunnel under the tcp transport: one-sided writes over a veth pair, plain and through WireGuard.

    sudo PYTHON bench/tunnel.py [--rounds N] [--json]

PYTHON has the package switchyard_moe installed. Needs Linux, root, iproute2 and wireguard-tools. Without the kernel's
WireGuard it takes `wireguard-go`, which is slower, and the output says so. The two ends are network namespaces of this
host, so both sides of the encryption share its processors. Exit code 0: measured. 1: something is missing or failed.
"""

import argparse
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time

SIZES = (64, 4096, 64 << 10, 1 << 20, 16 << 20)
SIDES = ("switchyard-a", "switchyard-b")
PLAIN = ("10.77.0.1", "10.77.0.2")
TUNNEL = ("10.78.0.1", "10.78.0.2")
PORT = 51820


def run(*command, timeout=20, **options):
    """Runs a command and returns its output. Raises with what it printed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, **options)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


def in_side(side, *command, **options):
    return run("ip", "netns", "exec", SIDES[side], *command, **options)


class Network:
    """Two namespaces with a veth pair and a WireGuard tunnel over it. Removes them at the end."""

    def __init__(self):
        self.daemons = []

    def __enter__(self):
        try:
            self.build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def build(self):
        self.remove()
        for side in (0, 1):
            run("ip", "netns", "add", SIDES[side])
            in_side(side, "ip", "link", "set", "lo", "up")
        run("ip", "link", "add", "sy-veth", "netns", SIDES[0], "type", "veth", "peer", "sy-veth", "netns", SIDES[1])
        for side in (0, 1):
            in_side(side, "ip", "addr", "add", f"{PLAIN[side]}/24", "dev", "sy-veth")
            in_side(side, "ip", "link", "set", "sy-veth", "up")
        self.kind = self.add_tunnel()

    def __exit__(self, *_):
        for daemon in self.daemons:
            daemon.kill()
            daemon.wait()
        self.remove()

    @staticmethod
    def remove():
        for side in SIDES:
            subprocess.run(["ip", "netns", "del", side], capture_output=True, timeout=20)

    def add_tunnel(self):
        private = [run("wg", "genkey") for _ in SIDES]
        public = [run("wg", "pubkey", input=key) for key in private]
        kind = "kernel"
        for side in (0, 1):
            name = f"sy-wg{side}"
            try:
                in_side(side, "ip", "link", "add", name, "type", "wireguard")
            except RuntimeError:
                kind = "wireguard-go"
                self.start_daemon(side, name)
            with tempfile.NamedTemporaryFile("w") as key:
                key.write(private[side])
                key.flush()
                in_side(side, "wg", "set", name, "listen-port", str(PORT), "private-key", key.name,
                        "peer", public[1 - side], "allowed-ips", f"{TUNNEL[1 - side]}/32",
                        "endpoint", f"{PLAIN[1 - side]}:{PORT}")
            in_side(side, "ip", "addr", "add", f"{TUNNEL[side]}/24", "dev", name)
            in_side(side, "ip", "link", "set", name, "mtu", "1420", "up")
        return kind

    def start_daemon(self, side, name):
        if shutil.which("wireguard-go") is None:
            raise RuntimeError("the kernel has no WireGuard and wireguard-go is not installed")
        environment = {**os.environ, "WG_I_PREFER_BUGGY_USERSPACE_TO_POLISHED_KMOD": "1"}
        self.daemons.append(subprocess.Popen(
            ["ip", "netns", "exec", SIDES[side], "wireguard-go", "-f", name],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment))
        for _ in range(100):
            # `wg` removes the socket of a daemon that does not listen yet, so nothing calls it before.
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
                probe.connect(f"/var/run/wireguard/{name}.sock")
                return
            time.sleep(0.05)
        raise RuntimeError(f"wireguard-go made no interface {name} within 5 s")


def receiver(address):
    """Prints its address, offers memory to the sender, and waits until its input ends."""
    from switchyard_moe import p2p

    memory = bytearray(max(SIZES))
    endpoint = p2p.Endpoint(bind=address, transports=["tcp"])
    _, region = endpoint.reg(memory)
    print(endpoint.get_metadata().hex(), flush=True)
    _, _, _, connection = endpoint.accept()
    _, description = endpoint.advertise(connection, region, memory)
    endpoint.send_notif(connection, description, "memory")
    sys.stdin.read()
    endpoint.close()


def sender(metadata):
    """Prints the median microseconds of a write of each size."""
    from switchyard_moe import p2p

    payload = bytearray(os.urandom(max(SIZES)))
    endpoint = p2p.Endpoint(transports=["tcp"])
    _, connection = endpoint.add_remote_endpoint(bytes.fromhex(metadata))
    _, region = endpoint.reg(payload)
    description = offered_memory(endpoint)
    medians = {}
    for size in SIZES:
        count = max(20, min(2000, (64 << 20) // size))
        times = []
        for turn in range(count + count // 10):
            started = time.perf_counter()
            endpoint.write(connection, region, payload, size, description)
            if turn >= count // 10:
                times.append(time.perf_counter() - started)
        medians[size] = statistics.median(times) * 1e6
    print(json.dumps(medians))
    endpoint.close()


def offered_memory(endpoint):
    """Waits at most 10 s for the receiver's description of its memory."""
    for _ in range(1000):
        for notification in endpoint.get_notifs():
            return notification.msg
        time.sleep(0.01)
    raise RuntimeError("the receiver offered no memory within 10 s")


def measure(addresses):
    """Runs one receiver and one sender over `addresses` and returns the sender's medians by size."""
    script = [sys.executable, os.path.abspath(__file__)]
    offer = subprocess.Popen(["ip", "netns", "exec", SIDES[1], *script, "--receiver", addresses[1]],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        metadata = offer.stdout.readline().strip()
        found = in_side(0, *script, "--sender", metadata, timeout=120)
        return {int(size): value for size, value in json.loads(found).items()}
    finally:
        offer.stdin.close()
        try:
            offer.wait(10)
        except subprocess.TimeoutExpired:
            offer.kill()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="runs of each path, in turns; the medians are printed")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--receiver", help=argparse.SUPPRESS)
    parser.add_argument("--sender", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.receiver:
        return receiver(arguments.receiver)
    if arguments.sender:
        return sender(arguments.sender)
    paths = {"plain": PLAIN, "tunnel": TUNNEL}
    found = {name: {size: [] for size in SIZES} for name in paths}
    try:
        with Network() as network:
            for turn in range(arguments.rounds):
                print(f"round {turn + 1} of {arguments.rounds}", file=sys.stderr)
                for name, addresses in paths.items():
                    for size, value in measure(addresses).items():
                        found[name][size].append(value)
            kind = network.kind
    except (RuntimeError, OSError, ValueError, subprocess.SubprocessError) as err:
        print(f"error: {err}", file=sys.stderr)
        return 1
    rows = [{"bytes": size, **{f"{name}_us": round(statistics.median(found[name][size]), 1) for name in paths}}
            for size in SIZES]
    if arguments.json:
        print(json.dumps({"wireguard": kind, "rounds": arguments.rounds, "rows": rows}))
        return 0
    print(f"WireGuard: {kind}")
    print(f"{'bytes':>10} {'plain us':>10} {'tunnel us':>10} {'ratio':>6}")
    for row in rows:
        print(f"{row['bytes']:>10} {row['plain_us']:>10} {row['tunnel_us']:>10} {row['tunnel_us'] / row['plain_us']:>6.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
