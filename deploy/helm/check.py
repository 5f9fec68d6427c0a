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
from cases import BAD, BASE, ETCD, GOOD, RUNBOOKS

FOLDER = pathlib.Path(__file__).parent
CHART = FOLDER / "switchyard"
RULES = FOLDER.parent / "prometheus" / "rules.yml"
GUIDE = FOLDER.parent.parent / "docs" / "how-to" / "kubernetes.md"
REFERENCE = FOLDER.parent.parent / "docs" / "reference" / "cli.md"
LINT_WARNING = 2
KUBERNETES_VERSIONS = ["1.29", "1.32", "1.35"]


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
    # The operator's own schemas are not part of Kubernetes.
    if item["kind"] == "PrometheusRule":
        check_rules(label, item["spec"])
        return
    if item["kind"] == "PodMonitor":
        if not item["spec"]["podMetricsEndpoints"]:
            fail(f"{label}: no endpoints")
        return
    for version in KUBERNETES_VERSIONS:
        try:
            kubernetes_validate.validate(item, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            fail(f"{label}, Kubernetes {version}: {error}")


def check_rules(label: str, spec: dict) -> None:
    """The rules are those of Prometheus' own file, apart from the address of their pages."""
    [path] = [path for path in (CHART / "files").iterdir()]
    if path.read_text() != RULES.read_text():
        fail(f"{path.name} of the chart is out of date: run cargo xtask dashboards")
    expected = yaml.safe_load(RULES.read_text())
    for group, own in zip(expected["groups"], spec["groups"], strict=True):
        for rule, own_rule in zip(group["rules"], own["rules"], strict=True):
            url = own_rule.get("annotations", {}).get("runbook_url")
            if url is None:
                continue
            folder, _, page = url.rpartition("/")
            if page != f"{rule['alert']}.md" or not folder.startswith("https://"):
                fail(f"{label}: {rule['alert']} has the page {url}")
            if folder == RUNBOOKS:
                rule["annotations"]["runbook_url"] = url
    if spec != expected:
        fail(f"{label}: the rules differ from {RULES.name}")


def check_security(name: str, values: dict, objects: list[dict]) -> None:
    """No pod can change its files or gain rights, secrets are files of no other user, and ports are closed."""
    for pod in pods_of(objects):
        spec, container = pod["spec"], pod["spec"]["containers"][0]
        label = f"{name}: {container['name']}"
        user = 10001
        if container["name"] == "expert-server":
            user = values.get("expertServers", {}).get("runAsUser", user)
        context = spec["securityContext"]
        if context["runAsUser"] != user or context["runAsNonRoot"] != (user != 0):
            fail(f"{label}: runs as {context}")
        if context["seccompProfile"] != {"type": "RuntimeDefault"}:
            fail(f"{label}: {context['seccompProfile']}")
        own = container["securityContext"]
        if (
            own["allowPrivilegeEscalation"]
            or not own["readOnlyRootFilesystem"]
            or own["capabilities"]["drop"] != ["ALL"]
        ):
            fail(f"{label}: {own}")
        if spec["enableServiceLinks"]:
            fail(f"{label}: variables of Services can look like settings")
        env = {entry["name"]: entry for entry in container["env"]}
        if any("valueFrom" in entry and "secretKeyRef" in entry["valueFrom"] for entry in env.values()):
            fail(f"{label}: a secret is in a variable, which does not follow its changes")
        mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        files = {
            f"{mounts[volume]['mountPath']}/{item['path']}"
            for volume in volumes
            for item in volumes[volume].get("secret", {}).get("items", [])
        }
        roles = bool(values["token"].get("rolesKey")) and container["name"] == "control-plane"
        wanted = {entry["value"] for key, entry in env.items() if key.endswith("_FILE")}
        if wanted != files:
            fail(f"{label}: expects the secrets {sorted(wanted)}, and {sorted(files)} are mounted")
        tokens = keys_of(pod, "SWITCHYARD_TOKENS_FILE"), keys_of(pod, "SWITCHYARD_TOKEN_FILE")
        cluster = values["token"].get("clusterKey")
        if tokens != ((("tokens", cluster)) if roles else (None, "token")):
            fail(f"{label}: has the keys {tokens} of the Secret")
        host = "[$(POD_IP)]" if values.get("ipFamily") == "IPv6" else "$(POD_IP)"
        hosts = {entry.get("value", "").rpartition(":")[0] for key, entry in env.items() if key.endswith("_LISTEN")}
        if container["name"] == "expert-server" and hosts != {host}:
            fail(f"{label}: listens on {hosts}, expected {host}")
        role = {"control-plane": "controlPlane", "expert-server": "expertServers"}[container["name"]]
        tls = values["tls"].get(f"{role}Secret") or values["tls"].get("existingSecret")
        mounted = volumes["tls"]["secret"]["secretName"] if "tls" in volumes else None
        if (
            mounted != tls
            or (mounted is not None) != ("tls" in mounts)
            or (mounted is None) == ("SWITCHYARD_TLS" in env)
        ):
            fail(f"{label}: has the certificate {mounted}, expected {tls}")
        audit = values.get("controlPlane", {}).get("auditLog") if role == "controlPlane" else None
        path = f"{mounts['state']['mountPath']}/{audit}" if audit and audit != "stdout" else None
        path = "/dev/stdout" if audit == "stdout" else path
        if env.get("SWITCHYARD_AUDIT_LOG", {}).get("value") != path:
            fail(f"{label}: the audit log is {env.get('SWITCHYARD_AUDIT_LOG')}, expected {path}")
        for volume in volumes.values():
            if volume.get("secret", {"defaultMode": 0o440})["defaultMode"] != 0o440:
                fail(f"{label}: other users can read {volume['name']}")
    policies = [item for item in objects if item["kind"] == "NetworkPolicy"]
    [servers] = [item for item in policies if item["metadata"]["name"].endswith("expert-server")]
    own, clients, monitoring = servers["spec"]["ingress"]
    if (
        "ports" in own
        or "weights" in str(clients["ports"])
        or [port["port"] for port in monitoring["ports"]] != ["metrics"]
    ):
        fail(f"{name}: the policy of servers is {servers['spec']['ingress']}")
    for pod in pods_of(objects):
        for port in pod["spec"]["containers"][0]["ports"]:
            ranges = [entry for entry in clients["ports"] if "endPort" in entry]
            is_open = any(entry["port"] <= port["containerPort"] <= entry["endPort"] for entry in ranges)
            if is_open and port["name"] in ("weights", "metrics"):
                fail(f"{name}: clients reach the port {port['name']}")


def keys_of(pod: dict, variable: str) -> str | None:
    """The key of the Secret that a variable with a file names."""
    [container] = pod["spec"]["containers"]
    paths = [entry["value"] for entry in container["env"] if entry["name"] == variable]
    for volume in pod["spec"]["volumes"]:
        [mount] = [mount for mount in container["volumeMounts"] if mount["name"] == volume["name"]]
        for item in volume.get("secret", {}).get("items", []):
            if [f"{mount['mountPath']}/{item['path']}"] == paths:
                return item["key"]
    return None


def check_store(name: str, values: dict, objects: list[dict]) -> None:
    """One control plane has a volume. Several have etcd, a name for each, other nodes, and a budget for disruptions."""
    given = values.get("controlPlane", {})
    [control] = [
        item for item in objects if item["kind"] == "StatefulSet" and item["metadata"]["name"].endswith("control")
    ]
    spec = control["spec"]
    pod = spec["template"]["spec"]
    [container] = pod["containers"]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    label = f"{name}: control plane"
    budgets = [
        item
        for item in objects
        if item["kind"] == "PodDisruptionBudget" and item["metadata"]["name"].endswith("control")
    ]
    if given.get("store") != "etcd":
        if spec["replicas"] != 1 or len(spec["volumeClaimTemplates"]) != 1 or budgets:
            fail(f"{label}: {spec['replicas']} with {spec.get('volumeClaimTemplates')} and {budgets}")
        if env["SWITCHYARD_DATA_DIR"] != "/state" or any("ETCD" in key for key in env):
            fail(f"{label}: has the variables {env}")
        return
    if spec["replicas"] != given.get("count", 3) or "volumeClaimTemplates" in spec or "SWITCHYARD_DATA_DIR" in env:
        fail(f"{label}: {spec['replicas']} with {spec.get('volumeClaimTemplates')}")
    [budget] = budgets
    if budget["spec"]["maxUnavailable"] != 1:
        fail(f"{label}: {budget['spec']}")
    etcd = given["etcd"]
    has_certificate = etcd.get("clientCertificate", False)
    expected = {
        "SWITCHYARD_STORE": "etcd",
        "SWITCHYARD_ETCD_ENDPOINTS": ",".join(etcd["endpoints"]),
        "SWITCHYARD_ETCD_PREFIX": etcd.get("prefix", "/switchyard/experts/demo"),
        "SWITCHYARD_ETCD_LEASE_S": str(etcd.get("leaseSeconds", 3)),
        "SWITCHYARD_ETCD_INSECURE": "true" if etcd.get("insecure") else None,
        "SWITCHYARD_ETCD_USER": etcd.get("user"),
        "SWITCHYARD_ETCD_PASSWORD_FILE": "/etcd-password/password" if "user" in etcd else None,
        "SWITCHYARD_ETCD_CA": "/etcd-tls/ca.crt" if "tlsSecret" in etcd else None,
        "SWITCHYARD_ETCD_CERT": "/etcd-tls/tls.crt" if has_certificate else None,
        "SWITCHYARD_ETCD_KEY": "/etcd-tls/tls.key" if has_certificate else None,
    }
    found = {key: env.get(key) for key in expected}
    if found != expected:
        fail(f"{label}: has {found}, expected {expected}")
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    secrets = {volume["name"]: volume["secret"]["secretName"] for volume in pod["volumes"]}
    for path, secret in [("/etcd-tls", etcd.get("tlsSecret")), ("/etcd-password", etcd.get("passwordSecret"))]:
        if secrets.get(mounts.get(path)) != secret:
            fail(f"{label}: {path} is {mounts.get(path)}, expected the Secret {secret}")
    terms = pod["affinity"].get("podAntiAffinity", {}).get("preferredDuringSchedulingIgnoredDuringExecution", [])
    keys = {term["podAffinityTerm"]["topologyKey"] for term in terms}
    labels = spec["template"]["metadata"]["labels"]
    if not all(selects(term["podAffinityTerm"]["labelSelector"]["matchLabels"], labels) for term in terms):
        fail(f"{label}: the anti-affinity does not select its own pods: {terms}")
    if ("affinity" not in given) != (keys == {"kubernetes.io/hostname", "topology.kubernetes.io/zone"}):
        fail(f"{label}: has the affinity {pod['affinity']}")
    # The name of a pod, as its Service gives it.
    host = f"$(POD_NAME).{spec['serviceName']}.experts.svc"
    scheme = "http" if values["tls"].get("insecure") else "https"
    port = container["ports"][0]["containerPort"]
    if env["SWITCHYARD_CONTROL_ADVERTISE"] != f"{scheme}://{host}:{port}":
        fail(f"{label}: advertises {env['SWITCHYARD_CONTROL_ADVERTISE']}")


def pods_of(objects: list[dict]) -> list[dict]:
    return [item["spec"]["template"] for item in objects if item["kind"] in ("StatefulSet", "DaemonSet")]


def selects(selector: dict, labels: dict) -> bool:
    return all(labels.get(key) == value for key, value in selector.items())


def check_monitors(name: str, values: dict, objects: list[dict]) -> None:
    """Prometheus asks each kind of pods over TLS with the authority of their own certificate."""
    for role, component in [("controlPlane", "control-plane"), ("expertServers", "expert-server")]:
        secret = values["tls"].get(f"{role}Secret") or values["tls"].get("existingSecret")
        monitors = [item for item in objects if item["kind"] == "PodMonitor"]
        for monitor in (item for item in monitors if item["metadata"]["name"].endswith(component)):
            [endpoint] = monitor["spec"]["podMetricsEndpoints"]
            ca = endpoint.get("tlsConfig", {}).get("ca")
            expected = {"secret": {"name": secret, "key": "ca.crt"}} if secret else None
            if ca != expected or (endpoint.get("scheme") == "https") != (secret is not None):
                fail(f"{name}: Prometheus asks {component} with {endpoint}, expected the authority {expected}")


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
        # Numbers are ports that the system gives out.
        wanted = [port for port in wanted if isinstance(port, str)]
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


def check_names(chart: helm_python.Chart) -> None:
    """The URLs of the notes, of the docs and of servers have names that the documented certificates have."""
    docs = GUIDE.read_text()
    notes = chart.render(BASE, name="experts", namespace="default")["switchyard/templates/NOTES.txt"]
    texts = {"NOTES.txt": notes, GUIDE.name: docs.replace("NAMESPACE", "default")}
    commands = re.findall(r"^switchyard certs issue .* --address ((?:.*\\\n)*.*)$", docs, re.MULTILINE)
    names = [set(command.replace("\\\n", " ").split()) for command in commands]
    if len(names) != 3:
        fail(f"{GUIDE.name}: found {len(names)} certificates, expected 3")
    rendered = str(chart.render({**BASE, "controlPlane": ETCD}, name="experts", namespace="default"))
    pods = re.findall(r"https://\$\(POD_NAME\)(\.[^:]+):", rendered)
    if len(pods) != 1 or any(f"'*{pods[0]}'" not in names[nth] for nth in (0, 1)):
        fail(f"{GUIDE.name}: no wildcard of a certificate has the names *{pods} of control planes on etcd: {names}")
    for label, text in texts.items():
        hosts = set(re.findall(r"dns://([^:/`]+):", text))
        if not hosts:
            fail(f"{label}: no URL of the control plane")
        for host in {*hosts, "experts-switchyard-control"}:
            # The certificate of the fleet, and that of the control plane.
            if any(host not in names[nth] for nth in (0, 1)):
                fail(f"{label}: no documented certificate has the name {host}: {names}")


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
            check_store(name, values, objects)
            check_monitors(name, values, objects)
            check_security(name, values, objects)
            num_objects += len(objects)
        check_names(chart)
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
