//! The folder rules as data: the crates that each crate may depend on, and the ones that it must not.

/// The Switchyard crates that a crate may depend on, by folder.
pub enum Ours {
    /// These, and with `optional = true` those of the second list.
    Only(&'static [&'static str], &'static [&'static str]),
    /// All but these.
    AllBut(&'static [&'static str]),
}

/// One crate's rule.
pub struct Rule {
    /// Its folder. A folder that ends in `/` stands for every crate below it without a rule of its own.
    pub folder: &'static str,
    /// Switchyard crates.
    pub ours: Ours,
    /// Packages of others that it must not depend on.
    pub forbidden: &'static [&'static str],
    /// Whether its root must say `#![forbid(unsafe_code)]`.
    pub forbids_unsafe: bool,
    /// Pairs of top-level modules that must not refer to each other.
    pub apart: &'static [(&'static str, &'static str)],
}

const fn only(folder: &'static str, ours: &'static [&'static str]) -> Rule {
    Rule { folder, ours: Ours::Only(ours, &[]), forbidden: &[], forbids_unsafe: false, apart: &[] }
}

const fn anything(folder: &'static str) -> Rule {
    Rule { ours: Ours::AllBut(&[]), ..only(folder, &[]) }
}

/// A crate that is in the workspace and not in this table breaks the rules; a crate that is only in this table
/// does not.
pub const RULES: &[Rule] = &[
    Rule { forbidden: &["cudarc", "rdma-sys", "axum", "reqwest"], ..only("p2p-core", &["trust"]) },
    only("transports/verbs", &["p2p-core"]),
    only("transports/libfabric", &["p2p-core"]),
    only("transports/cuda-ipc", &["p2p-core", "kernels"]),
    only("transports/proxy", &["p2p-core", "kernels"]),
    only("transports/proxy/driver", &[]),
    only("transports/ibgda", &["p2p-core", "kernels"]),
    only("transports/ibgda/network", &["p2p-core", "kernels", "transports/ibgda"]),
    // A program, not a library: it brings NICs up with the control path, or rehearses that with the software NIC.
    only(
        "transports/ibgda/bring-up",
        &["kernels", "transports/ibgda", "softnic/driver", "softnic/verbs"],
    ),
    only("message-engine", &["p2p-core", "trust"]),
    only(
        "python",
        &[
            "attention-client",
            "checkpoint",
            "control-plane/api",
            "message-engine",
            "p2p-core",
            "telemetry",
            "transports/libfabric",
            "transports/verbs",
            "trust",
        ],
    ),
    only("softnic", &["p2p-core", "kernels"]),
    only("softnic/driver", &[]),
    only("softnic/verbs", &["p2p-core", "kernels", "softnic", "transports/ibgda"]),
    Rule { forbidden: &["tokio", "axum", "hyper"], ..only("protocol", &["p2p-core"]) },
    Rule { forbids_unsafe: true, ..only("telemetry", &[]) },
    only("checkpoint", &[]),
    Rule { forbidden: &["tokio", "axum", "hyper", "reqwest"], ..only("kernels", &[]) },
    Rule {
        ours: Ours::Only(
            &["protocol", "p2p-core", "control-plane/api", "telemetry", "trust"],
            &["checkpoint", "kernels", "transports/proxy", "transports/cuda-ipc"],
        ),
        apart: &[("client", "device")],
        ..only("attention-client", &[])
    },
    only("reference-model", &["attention-client", "checkpoint"]),
    only("expert-server/compute", &["checkpoint"]),
    Rule {
        ours: Ours::AllBut(&["control-plane", "attention-client", "reference-model", "cli"]),
        apart: &[("cpu", "device"), ("data", "device")],
        ..only("expert-server", &[])
    },
    Rule {
        forbids_unsafe: true,
        ..only("control-plane", &["control-plane/api", "httpd", "telemetry", "trust"])
    },
    Rule { forbids_unsafe: true, ..only("control-plane/api", &["trust"]) },
    only("httpd", &["trust"]),
    Rule { forbids_unsafe: true, forbidden: &["axum", "hyper", "reqwest"], ..only("trust", &[]) },
    only("xtask", &[]),
    anything("cli"),
    anything("tests"),
    anything("tests/"),
    anything("bench/"),
];

/// The rule of the crate in `folder`.
pub fn rule_of(folder: &str) -> Option<&'static Rule> {
    let exact = RULES.iter().find(|rule| rule.folder == folder);
    exact.or_else(|| {
        RULES.iter().find(|rule| rule.folder.ends_with('/') && folder.starts_with(rule.folder))
    })
}
