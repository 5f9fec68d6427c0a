//! The alerts. Each has a page in `docs/runbooks`.

use attention_client::metrics::names as client;
use control_plane::metric_names as control;
use expert_server::metrics::names as server;

/// An alert of Prometheus.
pub struct Alert {
    pub name: &'static str,
    pub expr: String,
    /// Time for which the expression must hold.
    pub hold: Option<&'static str>,
    pub severity: &'static str,
    pub summary: &'static str,
    /// First thing to do, in a sentence or two. The page has the rest.
    pub description: &'static str,
}

/// All alerts, in the order of the file.
pub fn all() -> Vec<Alert> {
    [fleet(), control_plane(), certificates(), clients()].into_iter().flatten().collect()
}

fn fleet() -> Vec<Alert> {
    vec![
        Alert {
            name: "SwitchyardExpertsWithoutReplica",
            expr: format!("{} > 0", control::EXPERTS_WITHOUT_REPLICA),
            hold: Some("5s"),
            severity: "critical",
            summary: "{{ $value }} experts have no live replica; layers that need them fail",
            description: "Start servers: `switchyard status` shows which servers are gone. New servers take the free experts by themselves.",
        },
        Alert {
            name: "SwitchyardUnderReplicated",
            expr: format!("{} > 0", control::EXPERTS_UNDER_REPLICATED),
            hold: Some("5m"),
            severity: "warning",
            summary: "{{ $value }} experts have fewer replicas than planned",
            description: "One more failure may leave an expert without a replica. Replace the lost server.",
        },
        Alert {
            name: "SwitchyardServerDown",
            expr: format!("up{{job=\"{SERVER_JOB}\"}} == 0"),
            hold: Some("1m"),
            severity: "warning",
            summary: "the metrics of expert server {{ $labels.instance }} do not answer",
            description: "Look whether the process runs. Clients have failed over if it died.",
        },
        Alert {
            name: "SwitchyardServerNotReady",
            expr: format!("{} == 0", server::READY),
            hold: Some("2m"),
            severity: "warning",
            summary: "expert server {{ $labels.instance }} is up but not ready",
            description: "Its /readyz gives the reason: experts are loading, it has had no lease yet, or it drains.",
        },
        Alert {
            name: "SwitchyardLeaseLost",
            // A server without a control plane holds no lease, either.
            expr: format!(
                "{} == 0 and {} == 1 and on() count(up{{job=\"{CONTROL_JOB}\"}}) > 0",
                server::LEASE_HELD,
                server::READY
            ),
            hold: Some("1m"),
            severity: "warning",
            summary: "expert server {{ $labels.instance }} has lost its lease",
            description: "It serves its clients, but the placement may leave it out. Check that it reaches a control plane; its log has the reason.",
        },
        Alert {
            name: "SwitchyardMembersUnreachable",
            expr: format!("{} > 0", control::MEMBERS_UNREACHABLE),
            hold: Some("30s"),
            severity: "warning",
            summary: "the control plane cannot connect to {{ $value }} serving members",
            description: "`switchyard status` names the members and the reason. Check --advertise and the network.",
        },
        Alert {
            name: "SwitchyardMembersInsecure",
            expr: format!("{} > 0", control::MEMBERS_INSECURE),
            hold: Some("1m"),
            severity: "warning",
            summary: "other hosts reach {{ $value }} expert servers in plain text or without a ticket",
            description: "`switchyard status` names the servers. Start them with --tls DIR and without --tickets off.",
        },
        Alert {
            name: "SwitchyardPlanShort",
            expr: format!("{} > 0", control::PLAN_SHORT),
            hold: Some("2m"),
            severity: "warning",
            summary: "the servers allow no plan with all replicas",
            description: "`switchyard status` says what is short: memory, servers, or files that can be read.",
        },
        Alert {
            name: "SwitchyardNameConflict",
            expr: format!("increase({}[10m]) > 0", control::NAME_CONFLICTS_TOTAL),
            hold: None,
            severity: "warning",
            summary: "two live expert servers use one name",
            description: "The later one serves. Give each server a name of its own; the control plane's log has the name.",
        },
        Alert {
            name: "SwitchyardMemberExpired",
            expr: format!("increase({}[5m]) > 0", control::EXPIRATIONS_TOTAL),
            hold: None,
            severity: "warning",
            summary: "a member's lease expired ({{ $labels.cause }})",
            description: "The server died, froze or lost the network. Clients have failed over. Read the server's log.",
        },
        Alert {
            name: "SwitchyardBadFrames",
            expr: format!("sum by (instance, code) (rate({}[5m])) > 0", server::BAD_FRAMES_TOTAL),
            hold: Some("1m"),
            severity: "warning",
            summary: "{{ $labels.instance }} refuses frames ({{ $labels.code }})",
            description: "`not_my_expert` ends when the placement settles. Other codes mean a client of another version, or a hostile client.",
        },
    ]
}

fn certificates() -> Vec<Alert> {
    vec![
        Alert {
            name: "SwitchyardCertificateExpires",
            expr: format!("{} - time() < 14 * 86400", control::TLS_CERTIFICATE_EXPIRY),
            hold: Some("1h"),
            severity: "warning",
            summary: "the TLS certificate of {{ $labels.instance }} ends within two weeks",
            description: "Issue it again with `switchyard certs issue --force` and copy the files over the old ones. No restart is needed.",
        },
        Alert {
            name: "SwitchyardCertificateUnusable",
            expr: format!("{} > 0", control::TLS_FILES_UNUSABLE),
            hold: Some("10s"),
            severity: "warning",
            summary: "the TLS files of {{ $labels.instance }} cannot be used; the previous ones are in force",
            description: "The process's log and /readyz give the reason. Copy certificate and key of one `switchyard certs issue`.",
        },
    ]
}

fn control_plane() -> Vec<Alert> {
    vec![
        Alert {
            name: "SwitchyardControlPlaneAbsent",
            expr: format!("absent(up{{job=\"{CONTROL_JOB}\"}} == 1)"),
            hold: Some("30s"),
            severity: "critical",
            summary: "no control plane answers",
            description: "Data flows on with the last placement, and no member can join or leave. Restart a control plane on its --data-dir or on its etcd.",
        },
        Alert {
            name: "SwitchyardControlPlaneDown",
            expr: format!("up{{job=\"{CONTROL_JOB}\"}} == 0"),
            hold: Some("30s"),
            severity: "warning",
            summary: "the control plane at {{ $labels.instance }} does not answer",
            description: "If it is the only one, SwitchyardControlPlaneAbsent fires too. Restart it on its --data-dir or on its etcd.",
        },
        Alert {
            name: "SwitchyardNoLeader",
            expr: format!("max({}) == 0", control::LEADER),
            hold: Some("30s"),
            severity: "critical",
            summary: "no control plane leads",
            description: "Data flows on with the last placement. Check that most members of etcd run; the control planes' logs give the reason.",
        },
        Alert {
            name: "SwitchyardStoreReadOnly",
            expr: format!("{} == 0", control::STORE_WRITABLE),
            hold: Some("30s"),
            severity: "critical",
            summary: "the control plane cannot write its state",
            description: "Free space on the disk of --data-dir, or restore the quorum of etcd. Until then the fleet serves, and servers of new names are refused.",
        },
        Alert {
            name: "SwitchyardTokenFileInvalid",
            expr: format!("{} == 0", control::TOKEN_FILE_VALID),
            hold: Some("10s"),
            severity: "warning",
            summary: "the token file of {{ $labels.instance }} cannot be used; the tokens read before are in force",
            description: "The control plane's log and `switchyard status` name the line and the fault. A restart would fail until it is corrected.",
        },
        Alert {
            name: "SwitchyardAuditLost",
            expr: format!("increase({}[10m]) > 0", control::AUDIT_LOST_TOTAL),
            hold: None,
            severity: "warning",
            summary: "the audit log of {{ $labels.instance }} lacks entries",
            description: "Free space on the disk of --audit-log. `switchyard status` has the reason; GET /v1/audit has the last 1,000 entries.",
        },
    ]
}

fn clients() -> Vec<Alert> {
    vec![
        Alert {
            name: "SwitchyardFailovers",
            expr: format!("sum by (reason) (increase({}[5m])) > 0", client::FAILOVERS_TOTAL),
            hold: None,
            severity: "info",
            summary: "clients failed over ({{ $labels.reason }})",
            description: "`closed`: a server died. `silent`: it froze or is overloaded. `invalid`, `desync`: a defect, or corrupt memory.",
        },
        Alert {
            name: "SwitchyardRequestsFailed",
            expr: format!("sum(rate({}{{outcome=\"error\"}}[1m])) > 0", client::REQUESTS_TOTAL),
            hold: Some("30s"),
            severity: "critical",
            summary: "calls of layers fail",
            description: "The client's error names the layer and the expert, or the broken rule.",
        },
        Alert {
            name: "SwitchyardLostOrDuplicated",
            expr: format!(
                "{} > 0 or {} > 0",
                client::LOST_REQUESTS_TOTAL,
                client::DUPLICATED_REQUESTS_TOTAL
            ),
            hold: None,
            severity: "critical",
            summary: "a count that must stay 0 is {{ $value }}",
            description: "This is a defect of Switchyard: outputs may be wrong. Please report it with the client's log.",
        },
    ]
}

/// Jobs of `deploy/prometheus/prometheus.yml` and of the Helm chart's PodMonitor.
pub const CONTROL_JOB: &str = "switchyard-control";
pub const SERVER_JOB: &str = "switchyard-server";
