"""Sets of values for the chart: ones that it accepts, and ones that it refuses."""

RUNBOOKS = "https://runbooks.example/switchyard"

CLAIM = {"volume": {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}}}
BASE = {"token": {"existingSecret": "cluster"}, "tls": {"existingSecret": "fleet-tls"}, "model": CLAIM}
ETCD = {
    "store": "etcd",
    "etcd": {
        "endpoints": ["https://etcd-0.etcd.db.svc:2379", "https://etcd-1.etcd.db.svc:2379"],
        "tlsSecret": "etcd-tls",
    },
}
PLAIN_ETCD = {"store": "etcd", "etcd": {"endpoints": ["http://10.0.0.5:2379"], "insecure": True}}
ROLES = {"existingSecret": "cluster", "rolesKey": "tokens"}
GOOD = {
    "defaults": BASE,
    "own token": {**BASE, "token": {"value": "0123456789abcdef"}},
    "a certificate for each role, and a file of the audit log": {
        **BASE,
        "tls": {"controlPlaneSecret": "control-tls", "expertServersSecret": "server-tls"},
        "podMonitor": {"enabled": True},
        "controlPlane": {"auditLog": "audit.jsonl"},
    },
    "the old token beside tokens with roles, on IPv6": {
        **BASE,
        "token": {**ROLES, "clusterKey": "cluster"},
        "ipFamily": "IPv6",
    },
    "a certificate of the control plane alone": {
        **BASE,
        "tls": {"existingSecret": "fleet-tls", "controlPlaneSecret": "control-tls"},
    },
    "plain text": {**BASE, "tls": {"insecure": True}},
    "control planes on etcd": {**BASE, "controlPlane": ETCD},
    "two control planes, all that etcd can ask for, and tokens with roles": {
        **BASE,
        "token": {**ROLES, "clusterKey": "cluster"},
        "podMonitor": {"enabled": True},
        "controlPlane": {
            **ETCD,
            "count": 2,
            "auditLog": "stdout",
            "affinity": {"nodeAffinity": {}},
            "etcd": {
                **ETCD["etcd"],
                "prefix": "/fleet",
                "leaseSeconds": 5,
                "user": "experts",
                "passwordSecret": "etcd-password",
                "clientCertificate": True,
            },
        },
    },
    "plain text to etcd and between pods": {**BASE, "tls": {"insecure": True}, "controlPlane": PLAIN_ETCD},
    "the audit log in the output": {**BASE, "controlPlane": {"auditLog": "stdout"}},
    "fixed parts": {**BASE, "controlPlane": {"placement": "fixed", "servers": 4}},
    "names by DNS": {**BASE, "discovery": "dns"},
    "endpoints by the API server": {**BASE, "discovery": "kubernetes"},
    "endpoints, and an account of one's own": {
        **BASE,
        "discovery": "kubernetes",
        "serviceAccount": {"name": "experts"},
        "expertServers": {"kind": "DaemonSet"},
    },
    "tokens with roles, and alerts": {
        **BASE,
        "token": ROLES,
        "podMonitor": {"enabled": True},
        "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
        "networkPolicy": {"transportPorts": None},
    },
    "a GPU and an RDMA device per node": {
        **BASE,
        "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "prometheusRule": {"enabled": True, "runbookUrl": RUNBOOKS + "/"},
        "controlPlane": {"priorityClassName": "system-cluster-critical", "annotations": {"team": "experts"}},
        "networkPolicy": {"clientNamespaces": {"matchLabels": {"team": "engines"}}},
        "expertServers": {
            "kind": "DaemonSet",
            "device": "cuda:0",
            "hostNetwork": True,
            "capabilities": ["IPC_LOCK"],
            "runAsUser": 0,
            "runtimeClassName": "nvidia",
            "priorityClassName": "system-node-critical",
            "annotations": {"k8s.v1.cni.cncf.io/networks": "rdma"},
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


def on_etcd(etcd: dict, **control_plane: object) -> dict:
    """Values of control planes on etcd, with some replaced."""
    return {**BASE, "controlPlane": {**ETCD, **control_plane, "etcd": {**ETCD["etcd"], **etcd}}}


# Values that must be refused, with a part of the message.
BAD = {
    "no token": ({**BASE, "token": {}}, "token.existingSecret"),
    "no certificate": ({**BASE, "tls": {}}, "tls.existingSecret"),
    "a certificate of servers only": ({**BASE, "tls": {"expertServersSecret": "server-tls"}}, "tls.controlPlaneSecret"),
    "an audit log outside of the state": ({**BASE, "controlPlane": {"auditLog": "../audit"}}, "auditLog"),
    "several control planes with a store of their own": ({**BASE, "controlPlane": {"count": 2}}, "store=etcd"),
    "an unknown store": ({**BASE, "controlPlane": {"store": "consul"}}, "store"),
    "etcd without endpoints": ({**BASE, "controlPlane": {"store": "etcd"}}, "etcd.endpoints"),
    "endpoints without etcd": (on_etcd(etcd={}, store="embedded"), "store=etcd"),
    "an endpoint that is no URL": (on_etcd(etcd={"endpoints": ["etcd:2379"]}), "endpoints"),
    "two endpoints in one": (on_etcd(etcd={"endpoints": ["https://a:2379,https://b:2379"]}), "endpoints"),
    "a password inside of an endpoint": (on_etcd(etcd={"endpoints": ["https://u:p@a:2379"]}), "endpoints"),
    "etcd without its authority": (on_etcd(etcd={"tlsSecret": ""}), "etcd.tlsSecret"),
    "etcd in plain text": (on_etcd(etcd={"endpoints": ["http://a:2379"]}), "etcd.insecure"),
    "a user of etcd without a password": (on_etcd(etcd={"user": "experts"}), "etcd.passwordSecret"),
    "a password of etcd without a user": (on_etcd(etcd={"passwordSecret": "p"}), "etcd.user"),
    "a certificate for etcd without a Secret": (
        {**BASE, "controlPlane": {**PLAIN_ETCD, "etcd": {**PLAIN_ETCD["etcd"], "clientCertificate": True}}},
        "etcd.tlsSecret",
    ),
    "a lease of etcd below the least": (on_etcd(etcd={"leaseSeconds": 1}), "leaseSeconds"),
    "an audit log without a volume": (on_etcd(etcd={}, auditLog="audit.jsonl"), "stdout"),
    "roles on etcd without a token of the cluster": ({**on_etcd(etcd={}), "token": ROLES}, "token.clusterKey"),
    "servers with the token of the cluster": (
        {**on_etcd(etcd={}), "token": {**ROLES, "clusterKey": "token"}},
        "every role",
    ),
    "a token of the cluster without roles": (
        {**BASE, "token": {"existingSecret": "cluster", "clusterKey": "cluster"}},
        "rolesKey",
    ),
    "an unknown family of addresses": ({**BASE, "ipFamily": "6"}, "ipFamily"),
    "no model": ({**BASE, "model": {}}, "model.volume"),
    "an unknown value": ({**BASE, "expertServer": {}}, "expertServer"),
    "an unknown kind": ({**BASE, "expertServers": {"kind": "Deployment"}}, "kind"),
    "a port out of range": ({**BASE, "controlPlane": {"port": 70000}}, "port"),
    "an unknown discovery": ({**BASE, "discovery": "consul"}, "discovery"),
    "half a range of ports": (
        {**BASE, "networkPolicy": {"transportPorts": {"first": 1, "last": None}}},
        "transportPorts",
    ),
    "a page of alerts that is no URL": ({**BASE, "prometheusRule": {"runbookUrl": "wiki"}}, "runbookUrl"),
    "an annotation that is no text": ({**BASE, "expertServers": {"annotations": {"a": 1}}}, "annotations"),
    "a device that does not exist": ({**BASE, "expertServers": {"device": "gpu"}}, "device"),
}
