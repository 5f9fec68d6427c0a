"""A control plane that only shows: the page's files, and a fleet made up from a seed."""

import http.server
import json
import pathlib
import random
import threading
import time
import urllib.parse

PAGE = pathlib.Path(__file__).parent.parent.parent / "control-plane" / "src" / "page"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
# The control plane's own, which the Rust tests compare with this text.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
FILES = {
    "/": "index.html",
    "/ui/style.css": "style.css",
    "/ui/uplot.js": "vendor/uplot.js",
    "/ui/uplot.css": "vendor/uplot.css",
    **{f"/ui/{name}": name for name in ("main.js", "api.js", "model.js", "members.js", "goals.js", "heat.js", "charts.js")},
}


def phases(nth: int) -> dict[str, int]:
    """Times of 1,000 frames in 100 batches."""
    return {"num_batches": 100, "queue_us": 37_000 + nth, "compute_us": 141_200 + 1000 * nth, "combine_us": 940 + nth}


HOSTILE = "<img/src=x/onerror=document.title='owned'>"
# Turns the direction of the text behind it around.
TURNED = " \u202e)nepo( dekcah\u2066"


class Fleet:
    """`num_members` servers that hold `num_experts` experts of `num_layers` layers, and one hostile name."""

    fingerprint = "0" * 64

    def __init__(self, seed: int, num_members: int, num_layers: int, num_experts: int, replicas: int = 2, prefix: str = "server"):
        random_ = random.Random(seed)
        self.layers = [3 + nth for nth in range(num_layers)]
        self.num_experts = num_experts
        names = [f"{prefix}-{nth}" for nth in range(num_members - 1)] + [HOSTILE]
        placed = [[random_.sample(range(num_members), min(replicas, num_members)) for _ in range(num_experts)] for _ in self.layers]
        loads: list[list[dict]] = [[] for _ in names]
        held = [0] * num_members
        for layer, experts in zip(self.layers, placed):
            for expert, servers in enumerate(experts):
                for server in servers:
                    held[server] += 1
                    tokens = int(2000 / (1 + expert) ** 0.8 * random_.uniform(0.5, 1.5))
                    if tokens and len(loads[server]) < 200:
                        loads[server].append({"layer": layer, "expert": expert, "num_tokens": tokens})
        self.placement = {
            "cluster_id": "mock",
            "epoch": 7,
            "model": None,
            "servers": [{"member_id": f"{nth:032x}", "name": name, "incarnation": nth, "data_addr": f"10.0.{nth // 256}.{nth % 256}:7171"} for nth, name in enumerate(names)],
            "layers": [{"layer": layer, "replicas": experts} for layer, experts in zip(self.layers, placed)],
        }
        self.members = [
            {
                "member_id": f"{nth:032x}",
                "name": name,
                "incarnation": 2**64 - 1 - nth,
                "data_addr": f"10.0.{nth // 256}.{nth % 256}:7171",
                "state": "draining" if nth == 1 else "serving",
                "suspected": nth == 2,
                "lease_remaining_ms": random_.randrange(1000, 3000),
                "experts_held": held[nth],
                "experts_assigned": held[nth] + (nth == 0) * 3,
                "load": {
                    "window_ms": 1000,
                    "busy_ms": random_.randrange(100, 900),
                    "num_frames": 1000,
                    # The last server is of a version that does not report them.
                    **({"phases": phases(nth)} if nth < num_members - 1 else {}),
                    "num_tokens": sum(entry["num_tokens"] for entry in loads[nth]),
                    "experts": loads[nth],
                    "links": [{"transport": "shm" if nth % 2 else "libfabric", "num_links": 3, "left_out": ["verbs: no device"] if nth == 0 else []}],
                    "device": f"cuda:{nth % 8}" + (TURNED if name == HOSTILE else ""),
                },
                **({"unreachable": "connection refused"} if nth == 2 else {}),
                **({"insecure": "plain text to other hosts (--insecure): give --tls DIR"} if nth == 0 else {}),
            }
            for nth, name in enumerate(names)
        ]
        self.health = "degraded"
        self.problems = [f"{HOSTILE} holds 5 experts", "INSECURE: server-0: plain text to other hosts (--insecure): give --tls DIR"]
        self.token: str | None = None
        self.roles = ["operator"]
        self.credential = "token"
        self.goals = {"replicas": 2, "spare": 0.25}
        # What changes the fleet, with its body.
        self.changes: list[tuple[str, str, object]] = []
        # Statuses of paths that are refused.
        self.refused: dict[str, int] = {}

    def answer(self, method: str, path: str, body: object = None) -> object:
        num_experts = len(self.layers) * self.num_experts
        if path == "/v1/status":
            return {
                "cluster_id": "mock",
                "version": "0.1.0",
                "uptime_ms": 93784000,
                "epoch": 7,
                "model": {"fingerprint": self.fingerprint, "architecture": "deepseek_v3", "hidden": 7168, "moe_layers": self.layers, "num_experts": self.num_experts, "top_k": 8},
                "num_servers": len(self.members),
                "replicas": 2,
                "lease_ttl_ms": 3000,
                "members": {"loading": 0, "serving": len(self.members) - 1, "draining": 1, "expired": 0},
                "experts_total": num_experts,
                "experts_without_replica": 0,
                "experts_under_replicated": 5,
                "num_watchers": 9,
                "store": {"kind": "snapshot", "writable": True, "error": None},
                "health": self.health,
                "problems": self.problems,
            }
        if path == "/v1/members":
            return {"members": self.members}
        if path == "/v1/placement":
            return self.placement
        if path == "/v1/goals" and method == "GET":
            return self.goals
        if path == "/v1/whoami":
            return {"name": "reader", "roles": self.roles, "credential": self.credential}
        if path.startswith("/v1/audit"):
            after = int(urllib.parse.parse_qs(urllib.parse.urlsplit(path).query)["after"][0])
            entries = [
                {"seq": 1, "unix_ms": int(time.time() * 1000), "name": HOSTILE, "roles": ["operator"], "credential": "token", "address": "10.0.0.9", "action": "drain", "target": "server-1", "outcome": "ok"},
                {"seq": 2, "unix_ms": int(time.time() * 1000), "name": "reader", "roles": ["viewer"], "credential": "token", "action": "goals", "outcome": "forbidden", "detail": "that needs the role operator"},
            ]
            return {"last_seq": 2, "entries": [entry for entry in entries if entry["seq"] > after]}
        if path.startswith("/v1/events"):
            texts = ["server-0 is serving", "server-1 is draining", "cannot connect to server-2: connection refused"]
            after = int(urllib.parse.parse_qs(urllib.parse.urlsplit(path).query)["after"][0])
            events = [{"seq": nth + 1, "unix_ms": int(time.time() * 1000), "severity": "info" if nth < 2 else "warn", "text": text} for nth, text in enumerate(texts)]
            return {"last_seq": len(events), "events": [event for event in events if event["seq"] > after]}
        if method in ("POST", "PUT"):
            self.changes.append((method, path, body))
            return {}
        return None


class Update(Fleet):
    """A fleet that moves to another model: half of the members serve each, and the new model is half complete."""

    new_fingerprint = "1" * 64

    def __init__(self, seed: int, num_members: int, num_layers: int, num_experts: int):
        num_old = num_members // 2
        super().__init__(seed, num_old, num_layers, num_experts)
        self.new = Fleet(seed + 1, num_members - num_old, num_layers, num_experts, prefix="new")
        self.new.fingerprint = self.new_fingerprint
        self.new.placement["epoch"] = 3
        for entry in self.new.placement["layers"][num_layers // 2 :]:
            entry["replicas"] = [[] for _ in entry["replicas"]]
        for part in (self, self.new):
            for nth, member in enumerate(part.members):
                member["fingerprint"] = part.fingerprint
                member["member_id"] = f"{part.fingerprint[0]}{nth:031x}"
        self.num_clients = 12

    def edition(self, part: Fleet, state: str, **more: object) -> dict:
        counts = {state: sum(member["state"] == state for member in part.members) for state in ("loading", "serving", "draining", "expired")}
        missing = sum(not servers for entry in part.placement["layers"] for servers in entry["replicas"])
        model = super().answer("GET", "/v1/status")["model"] | {"fingerprint": part.fingerprint}
        return {
            "fingerprint": part.fingerprint,
            "state": state,
            "model": model,
            "epoch": part.placement["epoch"],
            "members": counts,
            "experts_total": len(part.layers) * part.num_experts,
            "experts_without_replica": missing,
            "experts_under_replicated": 0,
            "num_clients": self.num_clients if state == "current" else 0,
            **more,
        }

    def answer(self, method: str, path: str, body: object = None) -> object:
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(path).query)
        if path == "/v1/status":
            editions = [self.edition(self, "current"), self.edition(self.new, "next", switches_when_complete=True)]
            return {**super().answer(method, path), "editions": editions}
        if path == "/v1/members":
            return {"members": self.members + self.new.members}
        if path.startswith("/v1/placement"):
            return self.new.placement if query.get("fingerprint") == [self.new_fingerprint] else self.placement
        return super().answer(method, path, body)


def serve(fleet: Fleet) -> http.server.ThreadingHTTPServer:
    """Serves `fleet` on a free port of the loopback address, on a thread of its own."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def reply(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.send_header("content-security-policy", POLICY)
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            name = FILES.get(self.path)
            if name:
                path = PAGE / name
                self.reply(200, TYPES[path.suffix], path.read_bytes())
                return
            self.do_POST()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            if fleet.token and self.headers.get("authorization") != f"Bearer {fleet.token}":
                self.reply(401, "application/json", b'{"code": "unauthorized", "message": "wrong token"}')
                return
            if status := fleet.refused.get(self.path):
                self.reply(status, "application/json", b'{"code": "refused", "message": "that needs another role"}')
                return
            answer = fleet.answer(self.command, self.path, json.loads(body) if body else None)
            if answer is None:
                self.reply(404, "application/json", b'{"code": "not_found", "message": "no such route"}')
            else:
                self.reply(200, "application/json", json.dumps(answer).encode())

        do_PUT = do_POST

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
