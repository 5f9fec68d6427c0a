//! Names of the metrics of the control plane. The help text where each is registered describes it; dashboards and
//! alerts are generated from the names.
#![allow(missing_docs, reason = "docs/reference/metrics.md describes each metric")]

// The metrics of the TLS files are those of every process with listeners.
pub use httpd::{TLS_CERTIFICATE_EXPIRY, TLS_FILES_UNUSABLE, TLS_RELOADS_TOTAL};

pub const ADVICE_CONFIDENCE: &str = "switchyard_control_advice_confidence";
pub const ADVISED_SERVERS: &str = "switchyard_control_advised_servers";
pub const AUDIT_LOST_TOTAL: &str = "switchyard_control_audit_lost_total";
pub const BUILD_INFO: &str = "switchyard_build_info";
pub const BUSIEST_SHARE: &str = "switchyard_control_busiest_share";
pub const COMPUTE_SHARE: &str = "switchyard_control_compute_share";
pub const CONNECTIONS: &str = "switchyard_control_connections";
pub const CONNECTIONS_CULLED_TOTAL: &str = "switchyard_control_connections_culled_total";
pub const ELECTION_ERRORS_TOTAL: &str = "switchyard_control_election_errors_total";
pub const EPOCH: &str = "switchyard_control_epoch";
pub const EXPERTS_UNDER_REPLICATED: &str = "switchyard_control_experts_under_replicated";
pub const EXPERTS_WITHOUT_REPLICA: &str = "switchyard_control_experts_without_replica";
pub const EXPERT_MOVES_TOTAL: &str = "switchyard_control_expert_moves_total";
pub const EXPERT_TOKENS_PER_SECOND: &str = "switchyard_control_expert_tokens_per_second";
pub const EXPIRATIONS_TOTAL: &str = "switchyard_control_expirations_total";
pub const FORWARDED_REQUESTS_TOTAL: &str = "switchyard_control_forwarded_requests_total";
pub const LATE_SHARE: &str = "switchyard_control_late_share";
pub const LEADER: &str = "switchyard_control_leader";
pub const MEMBERS: &str = "switchyard_control_members";
pub const MEMBERS_INSECURE: &str = "switchyard_control_members_insecure";
pub const MEMBERS_UNREACHABLE: &str = "switchyard_control_members_unreachable";
pub const MODEL_CLIENTS: &str = "switchyard_control_model_clients";
pub const MODEL_EXPERTS_WITHOUT_REPLICA: &str = "switchyard_control_model_experts_without_replica";
pub const MODEL_SERVING_MEMBERS: &str = "switchyard_control_model_serving_members";
pub const NAME_CONFLICTS_TOTAL: &str = "switchyard_control_name_conflicts_total";
pub const PLACEMENT_CHANGES_TOTAL: &str = "switchyard_control_placement_changes_total";
pub const PLACEMENT_SECONDS: &str = "switchyard_control_placement_seconds";
pub const PLAN_SECONDS: &str = "switchyard_control_plan_seconds";
pub const PLAN_SHORT: &str = "switchyard_control_plan_short";
pub const QUEUE_FRAMES: &str = "switchyard_control_queue_frames";
pub const REFUSED_REQUESTS_TOTAL: &str = "switchyard_control_refused_requests_total";
pub const REGISTRATIONS_TOTAL: &str = "switchyard_control_registrations_total";
pub const REQUEST_SECONDS: &str = "switchyard_control_request_seconds";
pub const STORE_WRITABLE: &str = "switchyard_control_store_writable";
pub const STORE_WRITE_ERRORS_TOTAL: &str = "switchyard_control_store_write_errors_total";
pub const STORE_WRITE_SECONDS: &str = "switchyard_control_store_write_seconds";
pub const SUSPECTS_TOTAL: &str = "switchyard_control_suspects_total";
pub const TERMS_TOTAL: &str = "switchyard_control_terms_total";
pub const TOKEN_FILE_VALID: &str = "switchyard_control_token_file_valid";
pub const WATCHERS: &str = "switchyard_control_watchers";
