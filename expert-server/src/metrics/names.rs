//! Names of the metrics of an expert server. The help text where each is registered describes it; dashboards and
//! alerts are generated from the names.
#![allow(missing_docs, reason = "docs/reference/metrics.md describes each metric")]

pub const BACKLOG_FRAMES: &str = "switchyard_server_backlog_frames";
pub const BAD_FRAMES_TOTAL: &str = "switchyard_server_bad_frames_total";
pub const BATCHES_TOTAL: &str = "switchyard_server_batches_total";
pub const BATCH_CLIENTS: &str = "switchyard_server_batch_clients";
pub const BATCH_TOKENS: &str = "switchyard_server_batch_tokens";
pub const BUILD_INFO: &str = "switchyard_build_info";
pub const BYTES_TOTAL: &str = "switchyard_server_bytes_total";
pub const CONNECTIONS: &str = "switchyard_server_connections";
pub const CONNECTIONS_CULLED_TOTAL: &str = "switchyard_server_connections_culled_total";
pub const ENTRIES_TOTAL: &str = "switchyard_server_entries_total";
pub const EXPERTS_LOADED: &str = "switchyard_server_experts_loaded";
pub const EXPERTS_STILL_ASKED: &str = "switchyard_server_experts_still_asked";
pub const EXPERT_BYTES: &str = "switchyard_server_expert_bytes";
pub const EXPERT_TOKENS_TOTAL: &str = "switchyard_server_expert_tokens_total";
pub const FRAMES_TOTAL: &str = "switchyard_server_frames_total";
pub const GRAPH_RECORD_SECONDS: &str = "switchyard_server_graph_record_seconds";
pub const HANDSHAKES_REJECTED_TOTAL: &str = "switchyard_server_handshakes_rejected_total";
pub const LEASE_HELD: &str = "switchyard_server_lease_held";
pub const LINKS: &str = "switchyard_server_links";
pub const LINKS_DROPPED_TOTAL: &str = "switchyard_server_links_dropped_total";
pub const LINKS_OPENED_TOTAL: &str = "switchyard_server_links_opened_total";
pub const LOAD_SECONDS: &str = "switchyard_server_load_seconds";
pub const PHASE_SECONDS: &str = "switchyard_server_phase_seconds";
pub const READY: &str = "switchyard_server_ready";
pub const REQUESTS_LIMITED_TOTAL: &str = "switchyard_server_requests_limited_total";
pub const SLEEPS_TOTAL: &str = "switchyard_server_sleeps_total";
pub const TOKENS_TOTAL: &str = "switchyard_server_tokens_total";
pub const WEIGHTS_DAMAGED_TOTAL: &str = "switchyard_server_weights_damaged_total";
pub const WEIGHTS_DEVICE_BYTES_TOTAL: &str = "switchyard_server_weights_device_bytes_total";
pub const WEIGHTS_GRANTS: &str = "switchyard_server_weights_grants";
pub const WEIGHTS_READ_BYTES_TOTAL: &str = "switchyard_server_weights_read_bytes_total";
pub const WEIGHTS_READ_EXPERTS_TOTAL: &str = "switchyard_server_weights_read_experts_total";
pub const WEIGHTS_REFUSED_TOTAL: &str = "switchyard_server_weights_refused_total";
pub const WEIGHTS_SENT_BYTES_TOTAL: &str = "switchyard_server_weights_sent_bytes_total";
