//! The protection of this control plane's port, as status and probes show it.

use std::net::SocketAddr;

use trust::tls::Security;

/// The port and its protection.
#[derive(Clone, Debug)]
pub(crate) struct Exposure {
    pub(crate) security: Security,
    /// The address of the settings.
    pub(crate) listen: String,
    /// URL at which other control planes reach this one, if there are several.
    pub(crate) advertise: Option<String>,
    pub(crate) local_addr: SocketAddr,
    /// Names plain text between this process and the store.
    pub(crate) store: Option<String>,
    /// False if every process that reaches the port may do everything.
    pub(crate) requires_identity: bool,
}

impl Exposure {
    /// Names plain text that other hosts can reach, and a port that asks them for no identity.
    pub(crate) fn insecure(&self) -> Option<String> {
        let plain_text = self.security.exposure(self.local_addr);
        let asks_none = (plain_text.is_some() && !self.requires_identity).then(|| {
            "it asks for no identity, so every process that reaches it may change the fleet: give --token-file or --tokens"
                .to_owned()
        });
        let parts: Vec<String> =
            [plain_text, asks_none, self.store.clone()].into_iter().flatten().collect();
        (!parts.is_empty()).then(|| parts.join("; "))
    }

    /// Each `host:port` by which the settings name this control plane.
    pub(crate) fn own_names(&self) -> impl Iterator<Item = &str> {
        let url = self.advertise.as_deref().unwrap_or_default();
        let authority = url.split_once("://").and_then(|(_, rest)| rest.split('/').next());
        [self.listen.as_str()].into_iter().chain(authority)
    }

    /// Why the TLS files on the disk cannot be used.
    pub(crate) fn tls_error(&self) -> Option<String> {
        self.security.tls.as_ref()?.status().problem
    }
}
