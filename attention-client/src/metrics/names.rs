//! Names of the metrics of a client. The help text where each is registered describes it; dashboards and
//! alerts are generated from the names.
#![allow(missing_docs, reason = "docs/reference/metrics.md describes each metric")]

pub const ABANDONED_REQUESTS_TOTAL: &str = "switchyard_client_abandoned_requests_total";
pub const BUILD_INFO: &str = "switchyard_build_info";
pub const BYTES_TOTAL: &str = "switchyard_client_bytes_total";
pub const CONNECTS_TOTAL: &str = "switchyard_client_connects_total";
pub const DUPLICATED_REQUESTS_TOTAL: &str = "switchyard_client_duplicated_requests_total";
pub const ERROR_FRAMES_TOTAL: &str = "switchyard_client_error_frames_total";
pub const FAILOVERS_TOTAL: &str = "switchyard_client_failovers_total";
pub const FRAMES_TOTAL: &str = "switchyard_client_frames_total";
pub const HEDGES_TOTAL: &str = "switchyard_client_hedges_total";
pub const INVALID_RESPONSES_TOTAL: &str = "switchyard_client_invalid_responses_total";
pub const LATE_SERVERS_TOTAL: &str = "switchyard_client_late_servers_total";
pub const LANES: &str = "switchyard_client_lanes";
pub const LANES_BUSY: &str = "switchyard_client_lanes_busy";
pub const LINKS: &str = "switchyard_client_links";
pub const LOST_REQUESTS_TOTAL: &str = "switchyard_client_lost_requests_total";
pub const MISSING_PAIRS_TOTAL: &str = "switchyard_client_missing_pairs_total";
pub const PAIRS_TOTAL: &str = "switchyard_client_pairs_total";
pub const PHASE_SECONDS: &str = "switchyard_client_phase_seconds";
pub const PLACEMENT_EPOCH: &str = "switchyard_client_placement_epoch";
pub const REQUESTS_TOTAL: &str = "switchyard_client_requests_total";
pub const RESENT_PAIRS_TOTAL: &str = "switchyard_client_resent_pairs_total";
pub const STALE_RESPONSES_TOTAL: &str = "switchyard_client_stale_responses_total";
pub const STALL_SECONDS: &str = "switchyard_client_stall_seconds";
pub const SUSPECTS_TOTAL: &str = "switchyard_client_suspects_total";
pub const TOKENS_TOTAL: &str = "switchyard_client_tokens_total";
