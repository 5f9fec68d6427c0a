"""Checks what builds and starts containers and services: sources of files, features, names of commands, flags and
variables. Nothing is built or started.
"""

import fnmatch
import pathlib
import re
import shlex
import sys
import tomllib

import yaml

ROOT = pathlib.Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
USER = 10001
INSTRUCTIONS = {"FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER", "EXPOSE", "STOPSIGNAL", "ENTRYPOINT", "CMD", "ARG"}


def fail(text: str) -> None:
    sys.exit(f"error: {text}")


class Commands:
    """Subcommands with their flags, and all variables, from the generated reference of the command line."""

    def __init__(self, reference: str) -> None:
        self.flags: dict[str, set[str]] = {}
        for title, body in re.findall(r"^## (.+?)$(.*?)(?=^## |\Z)", reference, re.MULTILINE | re.DOTALL):
            self.flags[title.strip("`").removeprefix("switchyard ")] = set(
                re.findall(r"^- `(--[a-z0-9-]+)", body, re.MULTILINE)
            )
        self.common = self.flags["Options of every command"]
        self.variables = set(re.findall(r"`(SWITCHYARD_[A-Z_]+)`", reference))

    def check(self, label: str, words: list[str]) -> None:
        name = next((name for n in (2, 1) if (name := " ".join(words[:n])) in self.flags), None)
        if name is None:
            fail(f"{label}: no command `switchyard {' '.join(words[:2])}`")
        flags = {word.split("=")[0] for word in words[1:] if word.startswith("--")}
        unknown = flags - self.flags[name] - self.common
        if unknown:
            fail(f"{label}: `switchyard {name}` has no {sorted(unknown)}")

    def check_variables(self, label: str, names: set[str]) -> None:
        unknown = {name for name in names if name.startswith("SWITCHYARD_")} - self.variables
        if unknown:
            fail(f"{label}: {sorted(unknown)} are no settings")


def instructions(path: pathlib.Path) -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    pairs = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    unknown = {word for word, *_ in pairs} - INSTRUCTIONS
    if unknown:
        fail(f"{path.name}: unknown instructions {sorted(unknown)}")
    return [(word, rest) for word, rest in pairs]


def check_containerfile(path: pathlib.Path, commands: Commands) -> None:
    lines = instructions(path)
    ignored = (path.parent / f"{path.name}.dockerignore").read_text()
    if ignored != (ROOT / ".containerignore").read_text():
        fail(f"{path.name}: Docker and Podman ignore different files")
    stages = {match[1] for word, rest in lines if word == "FROM" and (match := re.search(r" AS (\w+)$", rest))}
    builds = " ".join(rest for word, rest in lines if word == "RUN")
    for word, rest in lines:
        words = shlex.split(rest)
        label = f"{path.name}: {word} {rest}"
        if word == "COPY" and words[0].startswith("--from="):
            stage = words[0].removeprefix("--from=")
            if stage not in stages or words[1] not in builds:
                fail(f"{label}: no stage makes this file")
        elif word == "COPY":
            for source in words[:-1]:
                if not (ROOT / source).exists() or any(fnmatch.fnmatch(source, entry) for entry in ignored.split()):
                    fail(f"{label}: no such file in the build's context")
        elif word == "ENV":
            commands.check_variables(label, {entry.split("=")[0] for entry in words})
        elif word == "USER" and int(rest) != USER:
            fail(f"{label}: expected {USER}, as in the chart")
    last = dict(lines)
    commands.check(f"{path.name}: CMD", yaml.safe_load(last["CMD"]))
    [entry] = yaml.safe_load(last["ENTRYPOINT"])
    if not any(word == "COPY" and rest.endswith(f" {entry}") for word, rest in lines):
        fail(f"{path.name}: nothing is copied to {entry}")
    check_build(path.name, lines, builds)


def check_build(label: str, lines: list[tuple[str, str]], builds: str) -> None:
    workspace = tomllib.loads((ROOT / "Cargo.toml").read_text())
    manifest = tomllib.loads((ROOT / "cli" / "Cargo.toml").read_text())
    [build] = re.findall(r"cargo build ([^&]*)", builds)
    words = build.split()
    package = words[words.index("--package") + 1]
    features = words[words.index("--features") + 1].split(",") if "--features" in words else []
    if package != manifest["package"]["name"] or not set(features) <= set(manifest["features"]):
        fail(f"{label}: {package} has no features {features}")
    images = [rest.split()[0] for word, rest in lines if word == "FROM"]
    rust = workspace["workspace"]["package"]["rust-version"]
    if not images[0].startswith(f"docker.io/library/rust:{rust}-"):
        fail(f"{label}: builds with {images[0]}, the workspace needs Rust {rust}")
    if "cuda" in features:
        # cudarc names the version of the driver's interface, as 13000 for 13.0.
        bindings = workspace["workspace"]["dependencies"]["cudarc"]["features"]
        [version] = [name.removeprefix("cuda-") for name in bindings if name.startswith("cuda-")]
        prefix = f"docker.io/nvidia/cuda:{version[:2]}.{int(version[2:4])}."
        if not images[-1].startswith(prefix) or "-base-" not in images[-1]:
            fail(f"{label}: runs on {images[-1]}, expected {prefix}*-base-*")
        if "cargo xtask cuda-toolkit" not in builds:
            fail(f"{label}: has no nvcc")


def check_compose(commands: Commands) -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for name, service in services.items():
        label = f"compose.yaml: {name}"
        for other in service.get("depends_on", {}):
            if other not in services:
                fail(f"{label}: depends on {other}, which is no service")
        if service.get("image") != "switchyard":
            continue
        commands.check_variables(label, set(service["environment"]))
        if "entrypoint" in service:
            # A script: each of its calls of the program.
            for line in re.findall(r"\bswitchyard ([^\n&|;]*)", "\n".join(service["command"])):
                commands.check(label, shlex.split(line))
        else:
            commands.check(label, service["command"])


def check_volumes() -> None:
    """The key of the authority is in the service that issues certificates only, and each holder has its own key."""
    document = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    services = document["services"]
    text = (DEPLOY / "Containerfile").read_text().replace("\\\n", " ")
    [owned] = re.findall(r"install -d -o 10001 -g 10001 (.*)", text)
    holders: dict[str, list[str]] = {}
    for name, service in services.items():
        for entry in service.get("volumes", []):
            # The source may have a colon in its default.
            volume, folder = re.fullmatch(r"(.*?):(/[^:]*)(?::ro)?", entry).groups()
            if volume not in document["volumes"]:
                continue
            holders.setdefault(volume, []).append(name)
            if service.get("image") == "switchyard" and folder not in owned.split():
                fail(f"compose.yaml: {name}: the image has no folder {folder} of the user {USER}")
    expected = {"authority": ["certs"], "public": ["certs", "prometheus"]}
    expected |= {f"{name}-certs": ["certs", name] for name in services if f"{name}-certs" in document["volumes"]}
    found = {volume: names for volume, names in holders.items() if volume != "state"}
    if found != expected or len(expected) != 5:
        fail(f"compose.yaml: the volumes are mounted by {found}, expected {expected}")


def check_units(commands: Commands) -> None:
    units = sorted((DEPLOY / "systemd").glob("*.service"))
    for path in units:
        text = path.read_text()
        [start] = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
        program, *words = shlex.split(start)
        if program != "/usr/local/bin/switchyard":
            fail(f"{path.name}: starts {program}")
        commands.check(path.name, words)
        commands.check_variables(path.name, set(re.findall(r"^Environment=([A-Z_]+)=", text, re.MULTILINE)))
    for path in sorted((DEPLOY / "systemd").glob("*.env.example")):
        commands.check_variables(path.name, set(re.findall(r"^#?([A-Z_]+)=", path.read_text(), re.MULTILINE)))


def check(reference: str) -> None:
    commands = Commands(reference)
    for path in [DEPLOY / "Containerfile", DEPLOY / "Containerfile.cuda"]:
        check_containerfile(path, commands)
    check_compose(commands)
    check_volumes()
    check_units(commands)
