#!/usr/bin/env python3
"""Checks the Helm chart: lints it, renders it with several values, and compares the objects with the schemas of
Kubernetes and with one another. Then checks the examples for autoscalers and the files of images. Exits with 1 at the
first error.

Needs the packages in requirements.txt. They include Helm as a library, so that no `helm` is needed.
"""

import pathlib
import re
import sys

import autoscalers
import helm_python
import images
import kubernetes_validate
import yaml

FOLDER = pathlib.Path(__file__).parent
CHART = FOLDER / "switchyard"
REFERENCE = FOLDER.parent.parent / "docs" / "reference" / "cli.md"
LINT_WARNING = 2
KUBERNETES_VERSIONS = ["1.29", "1.32", "1.35"]

CLAIM = {"volume": {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}}}
BASE = {"token": {"existingSecret": "cluster"}, "tls": {"existingSecret": "fleet-tls"}, "model": CLAIM}
GOOD = {
    "defaults": BASE,
    "own token": {**BASE, "token": {"value": "0123456789abcdef"}},
    "plain text": {**BASE, "tls": {"insecure": True}},
    "fixed parts": {**BASE, "controlPlane": {"placement": "fixed", "servers": 4}},
    "names by DNS": {**BASE, "discovery": "dns"},
    "endpoints by the API server": {**BASE, "discovery": "kubernetes"},
    "endpoints, and an account of one's own": {
        **BASE,
        "discovery": "kubernetes",
        "serviceAccount": {"name": "experts"},
        "expertServers": {"kind": "DaemonSet"},
    },
    "a GPU and an RDMA device per node": {
        **BASE,
        "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "networkPolicy": {"clientNamespaces": {"matchLabels": {"team": "engines"}}},
        "expertServers": {
            "kind": "DaemonSet",
            "device": "cuda:0",
            "hostNetwork": True,
            "capabilities": ["IPC_LOCK"],
            "shmSize": "2Gi",
            "nodeSelector": {"nvidia.com/gpu.present": "true"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
            "resources": {
                "limits": {"nvidia.com/gpu": 1, "rdma/hca": 1, "memory": "64Gi", "hugepages-2Mi": "1Gi"},
                "requests": {"cpu": "8", "memory": "64Gi"},
            },
            "env": [{"name": "SWITCHYARD_DEVICE_DTYPE", "value": "fp8"}],
        },
    },
}
# Values that must be refused, with a part of the message.
BAD = {
    "no token": ({**BASE, "token": {}}, "token.existingSecret"),
    "no certificate": ({**BASE, "tls": {}}, "tls.existingSecret"),
    "no model": ({**BASE, "model": {}}, "model.volume"),
    "an unknown value": ({**BASE, "expertServer": {}}, "expertServer"),
    "an unknown kind": ({**BASE, "expertServers": {"kind": "Deployment"}}, "kind"),
    "a port out of range": ({**BASE, "controlPlane": {"port": 70000}}, "port"),
    "an unknown discovery": ({**BASE, "discovery": "consul"}, "discovery"),
    "a device that does not exist": ({**BASE, "expertServers": {"device": "gpu"}}, "device"),
}


def fail(text: str) -> None:
    sys.exit(f"error: {text}")


def render(chart: helm_python.Chart, values: dict) -> list[dict]:
    chart.validate_schema(values)
    files = chart.render(values, name="demo", namespace="experts")
    objects = []
    for path, text in files.items():
        if path.endswith(".yaml"):
            objects.extend(document for document in yaml.safe_load_all(text) if document)
    return objects


def check_object(name: str, item: dict) -> None:
    label = f"{name}: {item['kind']} {item['metadata']['name']}"
    if item["apiVersion"] == "monitoring.coreos.com/v1":
        # The operator's own schema is not part of Kubernetes.
        if not item["spec"]["podMetricsEndpoints"]:
            fail(f"{label}: no endpoints")
        return
    for version in KUBERNETES_VERSIONS:
        try:
            kubernetes_validate.validate(item, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            fail(f"{label}, Kubernetes {version}: {error}")


def pods_of(objects: list[dict]) -> list[dict]:
    return [item["spec"]["template"] for item in objects if item["kind"] in ("StatefulSet", "DaemonSet")]


def selects(selector: dict, labels: dict) -> bool:
    return all(labels.get(key) == value for key, value in selector.items())


def check_references(name: str, objects: list[dict], known_variables: set[str]) -> None:
    """Every selector finds exactly one kind of pods, every named port exists, every variable is a setting."""
    pods = pods_of(objects)
    if len(pods) != 2:
        fail(f"{name}: {len(pods)} workloads, expected control plane and expert servers")
    for item in objects:
        spec = item.get("spec", {})
        selector = spec.get("podSelector", spec.get("selector"))
        if selector is None:
            continue
        selector = selector.get("matchLabels", selector)
        matching = [pod for pod in pods if selects(selector, pod["metadata"]["labels"])]
        label = f"{name}: {item['kind']} {item['metadata']['name']}"
        if len(matching) != 1:
            fail(f"{label} selects {len(matching)} workloads, expected 1")
        container = matching[0]["spec"]["containers"][0]
        ports = {port["name"] for port in container["ports"]}
        wanted = [port["targetPort"] for port in spec.get("ports", [])]
        wanted += [port["port"] for port in spec.get("podMetricsEndpoints", [])]
        wanted += [port["port"] for rule in spec.get("ingress", []) for port in rule.get("ports", [])]
        if not ports.issuperset(wanted):
            fail(f"{label} names the ports {wanted}, the container has {sorted(ports)}")
    for pod in pods:
        container = pod["spec"]["containers"][0]
        names = {entry["name"] for entry in container["env"]}
        unknown = {entry for entry in names if entry.startswith("SWITCHYARD_")} - known_variables
        if unknown:
            fail(f"{name}: {sorted(unknown)} are not in {REFERENCE.name}")
        volumes = {volume["name"] for volume in pod["spec"].get("volumes", [])} | {"state"}
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        if not volumes.issuperset(mounted):
            fail(f"{name}: {sorted(mounted - volumes)} are mounted and no volumes")
        grace = pod["spec"]["terminationGracePeriodSeconds"]
        drain = [entry for entry in container["env"] if entry["name"] == "SWITCHYARD_DRAIN_TIMEOUT_MS"]
        if drain and int(drain[0]["value"]) >= grace * 1000:
            fail(f"{name}: the kubelet kills a server after {grace} s, before its drain ends")


def check_discovery(name: str, values: dict, objects: list[dict]) -> None:
    """Servers find the control plane's Service, and only those that ask the API server may do so."""
    discovery = values.get("discovery", "dns")
    control = next(
        item for item in objects if item["kind"] == "Service" and item["metadata"]["name"].endswith("control")
    )
    service, port = control["metadata"]["name"], control["spec"]["ports"][0]
    servers = next(pod for pod in pods_of(objects) if pod["spec"]["containers"][0]["name"] == "expert-server")["spec"]
    env = {entry["name"]: entry.get("value") for entry in servers["containers"][0]["env"]}
    expected = {
        "dns": f"dns://{service}:{port['port']}",
        "kubernetes": f"k8s://experts/{service}:{port['name']}",
    }[discovery]
    if env["SWITCHYARD_CONTROL_PLANE"] != expected:
        fail(f"{name}: servers look for {env['SWITCHYARD_CONTROL_PLANE']}, expected {expected}")
    if control["spec"]["clusterIP"] != "None":
        fail(f"{name}: the Service of the control plane is not headless")
    asks = discovery == "kubernetes"
    if servers["automountServiceAccountToken"] != asks:
        fail(f"{name}: the token of the ServiceAccount is {'absent' if asks else 'mounted'}")
    roles = [item for item in objects if item["kind"] == "Role"]
    bindings = [item for item in objects if item["kind"] == "RoleBinding"]
    if len(roles) != asks or len(bindings) != asks:
        fail(f"{name}: {len(roles)} roles and {len(bindings)} bindings")
    if asks:
        rules = [
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
        ]
        [subject] = bindings[0]["subjects"]
        if roles[0]["rules"] != rules or bindings[0]["roleRef"]["name"] != roles[0]["metadata"]["name"]:
            fail(f"{name}: the role has the rules {roles[0]['rules']}, expected {rules}")
        if subject["name"] != servers["serviceAccountName"] or subject["namespace"] != "experts":
            fail(f"{name}: the role is bound to {subject}")


def main() -> None:
    report = helm_python.lint(CHART, values=BASE)
    problems = [message for message in report["messages"] if message["severity"] >= LINT_WARNING]
    if problems or report["errors"] or report["total_charts_linted"] != 1:
        fail(f"helm lint: {report}")
    known_variables = set(re.findall(r"`(SWITCHYARD_[A-Z_]+)`", REFERENCE.read_text()))
    num_objects = 0
    with helm_python.Chart.load(CHART) as chart:
        for name, values in GOOD.items():
            objects = render(chart, values)
            for item in objects:
                check_object(name, item)
            check_references(name, objects, known_variables)
            check_discovery(name, values, objects)
            num_objects += len(objects)
        for name, (values, expected) in BAD.items():
            try:
                render(chart, values)
            except helm_python.HelmError as error:
                if expected not in str(error):
                    fail(f"{name}: the message lacks {expected!r}: {error}")
            else:
                fail(f"{name}: accepted")
    autoscalers.check(KUBERNETES_VERSIONS)
    images.check(REFERENCE.read_text())
    print(
        f"helm {helm_python.helm_sdk_version()}: {num_objects} objects of {len(GOOD)} sets of values are valid for "
        f"Kubernetes {', '.join(KUBERNETES_VERSIONS)}; {len(BAD)} bad sets are refused"
    )


if __name__ == "__main__":
    main()
