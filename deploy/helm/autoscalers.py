"""Checks the examples for autoscalers: the HPA with the schemas of Kubernetes, KEDA's objects with the fields that its
documentation names, and both with the chart's advice.

The fields are those of KEDA's resource definitions in version 2.16 (`config/crd/bases` of its repository), and the
parameters those of its scaler: https://keda.sh/docs/2.16/scalers/metrics-api/.
"""

import pathlib
import sys

import jsonschema
import kubernetes_validate
import yaml

FOLDER = pathlib.Path(__file__).parent.parent / "kubernetes"
COUNT = {"type": "integer", "minimum": 0}
TEXT = {"type": "string", "minLength": 1}


def closed(required: list[str], **properties: dict) -> dict:
    """A schema of an object that has no other fields than these."""
    return {"type": "object", "additionalProperties": False, "required": required, "properties": properties}


METRICS_API = closed(
    ["url", "valueLocation", "targetValue"],
    url={"type": "string", "pattern": "^https?://"},
    valueLocation=TEXT,
    format={"enum": ["json", "xml", "yaml", "prometheus"]},
    targetValue={"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?$"},
    activationTargetValue={"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?$"},
    authMode={"enum": ["apiKey", "basic", "tls", "bearer"]},
    unsafeSsl={"enum": ["true", "false"]},
)
TRIGGER = closed(
    ["type", "metadata"],
    type={"const": "metrics-api"},
    name=TEXT,
    metadata=METRICS_API,
    metricType={"enum": ["AverageValue", "Value", "Utilization"]},
    useCachedMetrics={"type": "boolean"},
    authenticationRef=closed(
        ["name"], name=TEXT, kind={"enum": ["TriggerAuthentication", "ClusterTriggerAuthentication"]}
    ),
)
SCALED_OBJECT = closed(
    ["scaleTargetRef", "triggers"],
    scaleTargetRef=closed(["name"], apiVersion=TEXT, kind=TEXT, name=TEXT, envSourceContainerName=TEXT),
    pollingInterval=COUNT,
    cooldownPeriod=COUNT,
    initialCooldownPeriod=COUNT,
    idleReplicaCount=COUNT,
    minReplicaCount=COUNT,
    maxReplicaCount=COUNT,
    fallback=closed(["failureThreshold", "replicas"], failureThreshold=COUNT, replicas=COUNT),
    advanced=closed(
        [],
        restoreToOriginalReplicaCount={"type": "boolean"},
        # Kubernetes' own schema checks the behaviour.
        horizontalPodAutoscalerConfig=closed([], name=TEXT, behavior={"type": "object"}),
    ),
    triggers={"type": "array", "minItems": 1, "items": TRIGGER},
)
SECRET_TARGET = closed(["parameter", "name", "key"], parameter=TEXT, name=TEXT, key=TEXT)
TRIGGER_AUTHENTICATION = closed(
    ["secretTargetRef"], secretTargetRef={"type": "array", "minItems": 1, "items": SECRET_TARGET}
)
SPECS = {"ScaledObject": SCALED_OBJECT, "TriggerAuthentication": TRIGGER_AUTHENTICATION}


def fail(text: str) -> None:
    sys.exit(f"error: {text}")


def load(name: str) -> dict[str, dict]:
    return {item["kind"]: item for item in yaml.safe_load_all((FOLDER / name).read_text())}


def check_kubernetes(label: str, item: dict, versions: list[str]) -> None:
    for version in versions:
        try:
            kubernetes_validate.validate(item, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            fail(f"{label}, Kubernetes {version}: {error}")


def check_keda(label: str, item: dict) -> None:
    if item["apiVersion"] != "keda.sh/v1alpha1":
        fail(f"{label}: apiVersion {item['apiVersion']}, expected keda.sh/v1alpha1")
    try:
        jsonschema.validate(item["spec"], SPECS[item["kind"]])
    except jsonschema.ValidationError as error:
        fail(f"{label}: {item['kind']}: {error.json_path}: {error.message}")


def check(versions: list[str]) -> None:
    [hpa] = load("hpa.yaml").values()
    check_kubernetes("hpa.yaml", hpa, versions)
    objects = load("keda.yaml")
    if set(objects) != set(SPECS):
        fail(f"keda.yaml has {sorted(objects)}, expected {sorted(SPECS)}")
    for item in objects.values():
        check_keda("keda.yaml", item)
    spec = objects["ScaledObject"]["spec"]
    # KEDA makes this HPA of the object.
    made = {**hpa, "spec": {**hpa["spec"], **spec["advanced"]["horizontalPodAutoscalerConfig"]}}
    check_kubernetes("keda.yaml, its HPA", made, versions)
    [trigger] = spec["triggers"]
    authentication = objects["TriggerAuthentication"]
    if trigger["authenticationRef"]["name"] != authentication["metadata"]["name"]:
        fail("keda.yaml: the trigger names another TriggerAuthentication")
    # The parameter of `authMode: bearer`.
    parameters = [entry["parameter"] for entry in authentication["spec"]["secretTargetRef"]]
    if trigger["metadata"]["authMode"] != "bearer" or parameters != ["token"]:
        fail(f"keda.yaml: the authentication has the parameters {parameters}, expected token")
    limits = (spec["minReplicaCount"], spec["maxReplicaCount"])
    if limits != (hpa["spec"]["minReplicas"], hpa["spec"]["maxReplicas"]) or limits[0] > limits[1]:
        fail(f"keda.yaml and hpa.yaml have other limits: {limits}")
    if spec["scaleTargetRef"] != hpa["spec"]["scaleTargetRef"]:
        fail("keda.yaml and hpa.yaml scale different workloads")
    # Each check can fail: these changes must be refused.
    for path, value in [(["maxReplicas"], 4), (["triggers", 0, "metadata", "targetValue"], 1), (["triggers"], [])]:
        broken = yaml.safe_load(yaml.safe_dump(objects["ScaledObject"]))
        place = broken["spec"]
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        if jsonschema.Draft7Validator(SCALED_OBJECT).is_valid(broken["spec"]):
            fail(f"a ScaledObject with {path} = {value!r} is accepted")
