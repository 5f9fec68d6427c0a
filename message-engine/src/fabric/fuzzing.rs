//! What fuzz targets reach of the decoders that peers' bytes go through.

use super::{cma, tcp};

/// Descriptions of peers over TCP and of peers on the same host.
#[must_use]
pub fn detail_samples() -> Vec<Vec<u8>> {
    [tcp::detail_samples(), cma::detail_samples()].concat()
}

/// Reads bytes as a peer's description of itself. What can be read must be the same when it is written
/// and read again.
pub fn check_detail(bytes: &[u8]) {
    tcp::check_detail(bytes);
    cma::check_detail(bytes);
}

/// What peers over TCP send on a data connection, one of each kind.
#[must_use]
pub fn tcp_samples() -> Vec<Vec<u8>> {
    tcp::samples()
}

/// Reads bytes as whatever a peer over TCP sends on a data connection, likewise.
pub fn check_tcp(bytes: &[u8]) {
    tcp::check(bytes);
}

/// Reads bytes as an entry of the table that a peer on the same host shares, and the key that it is asked
/// for: what a key opens ends before the last address.
pub fn check_cma_table(bytes: &[u8]) {
    cma::check_table(bytes);
}
