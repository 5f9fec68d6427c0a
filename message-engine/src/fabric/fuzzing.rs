//! Entry points of fuzz targets into the decoders of peers' bytes.

use super::{cma, stream};

/// Encoded details of peers over TCP and shared memory, and of peers on the same host.
#[must_use]
pub fn detail_samples() -> Vec<Vec<u8>> {
    [stream::detail_samples(), cma::detail_samples()].concat()
}

/// Decodes bytes as a peer's detail. A decoded one must stay the same when it is encoded and decoded again.
pub fn check_detail(bytes: &[u8]) {
    stream::check_detail(bytes);
    cma::check_detail(bytes);
}

/// Encoded messages of peers over TCP on a data connection, one of each kind.
#[must_use]
pub fn tcp_samples() -> Vec<Vec<u8>> {
    stream::samples()
}

/// Decodes bytes as each message that a peer over TCP sends on a data connection, with the same check.
pub fn check_tcp(bytes: &[u8]) {
    stream::check(bytes);
}

/// Reads bytes as a key and as its entry in the table that a peer on the same host shares. The range that the key opens
/// must end before the last address.
pub fn check_cma_table(bytes: &[u8]) {
    cma::check_table(bytes);
}
