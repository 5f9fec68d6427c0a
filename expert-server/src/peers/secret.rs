//! The secret that servers show each other on the port for weights where there are no tickets.

use std::fmt;

use crate::config::Secret;

/// The secret of the port for weights. It is derived from the token that the servers of a fleet share.
///
/// Without TLS the message engine sends it unencrypted. A reader of the network can then learn this secret, and read
/// weights with it. The reader cannot compute the token, which opens the control plane and the servers.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct WeightsSecret(String);

impl WeightsSecret {
    /// Derives the secret with BLAKE3's key derivation: 64 hexadecimal digits.
    pub(crate) fn of(token: &Secret) -> Self {
        let key = blake3::derive_key(CONTEXT, token.reveal().as_bytes());
        Self(blake3::Hash::from_bytes(key).to_hex().as_str().to_owned())
    }

    /// The digits that the engine sends.
    pub(super) fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for WeightsSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WeightsSecret(…)")
    }
}

/// Purpose of the derived key. Servers with another text refuse each other.
const CONTEXT: &str = "switchyard 2026 weights of peers";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_secret_is_derived_from_the_token() {
        // From the Python package `blake3`: blake3(b"sesame", derive_key_context=CONTEXT).hexdigest().
        let known = "2e52a438bf02c78a2f6e4427b23d570ca266846af6a9b2cc87641ad15b8a84ba";
        let secret = WeightsSecret::of(&Secret::new("sesame"));
        assert_eq!(secret.reveal(), known);
        assert_ne!(WeightsSecret::of(&Secret::new("sesame ")), secret);
        assert!(!format!("{secret:?}").contains(known));
    }
}
