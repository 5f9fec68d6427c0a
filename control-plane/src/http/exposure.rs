//! The protection of this control plane's port, as status and probes show it.

use std::net::SocketAddr;

use trust::tls::Security;

/// The port and its protection.
#[derive(Clone, Debug)]
pub(crate) struct Exposure {
    pub(crate) security: Security,
    /// The address of the settings.
    pub(crate) listen: String,
    pub(crate) local_addr: SocketAddr,
}

impl Exposure {
    /// Names plain text that other hosts can reach.
    pub(crate) fn insecure(&self) -> Option<String> {
        self.security.exposure(self.local_addr)
    }

    /// Why the TLS files on the disk cannot be used.
    pub(crate) fn tls_error(&self) -> Option<String> {
        self.security.tls.as_ref()?.status().problem
    }
}
