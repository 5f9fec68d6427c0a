//! Keys of tickets and proofs.

use std::fmt;
use std::str::FromStr;

use pasetors::keys::{AsymmetricKeyPair, AsymmetricPublicKey, AsymmetricSecretKey, Generate};
use pasetors::paserk::{FormatAsPaserk, Id};
use pasetors::version4::{PublicToken, V4};

use super::SignError;

/// Secret key of ed25519. It never leaves the process: it has no text form, and its debug output shows the public part.
pub struct SecretKey {
    secret: AsymmetricSecretKey<V4>,
    public: PublicKey,
}

impl SecretKey {
    /// A new key from the system's random numbers.
    ///
    /// # Errors
    /// [`SignError::Library`] if the library cannot make one.
    pub fn generate() -> Result<Self, SignError> {
        let pair = AsymmetricKeyPair::<V4>::generate().map_err(|_| SignError::Library)?;
        Ok(Self { secret: pair.secret, public: PublicKey(pair.public) })
    }

    /// The public part.
    pub const fn public(&self) -> &PublicKey {
        &self.public
    }

    pub(super) fn sign(
        &self,
        payload: &[u8],
        footer: Option<&[u8]>,
        assertion: &[u8],
    ) -> Result<String, SignError> {
        PublicToken::sign(&self.secret, payload, footer, Some(assertion))
            .map_err(|_| SignError::Library)
    }
}

impl fmt::Debug for SecretKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SecretKey(of {})", self.public)
    }
}

/// Public key of ed25519. Its text is a PASERK: `k4.public.` and 43 characters.
#[derive(Clone, PartialEq)]
pub struct PublicKey(AsymmetricPublicKey<V4>);

impl Eq for PublicKey {}

impl PublicKey {
    /// The name of the key in the footers of tickets.
    pub fn id(&self) -> KeyId {
        KeyId(paserk(&Id::from(&self.0)))
    }

    pub(super) const fn inner(&self) -> &AsymmetricPublicKey<V4> {
        &self.0
    }
}

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&paserk(&self.0))
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PublicKey({self})")
    }
}

impl FromStr for PublicKey {
    type Err = InvalidKey;

    fn from_str(text: &str) -> Result<Self, InvalidKey> {
        AsymmetricPublicKey::try_from(text).map(Self).map_err(|_| InvalidKey { length: text.len() })
    }
}

/// A text that is no public key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a text of {length} bytes is no public key: expected k4.public. and 43 characters")]
pub struct InvalidKey {
    length: usize,
}

/// Name of a public key: a PASERK, `k4.pid.` and 44 characters.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KeyId(String);

impl KeyId {
    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn paserk(value: &impl FormatAsPaserk) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = value.fmt(&mut text);
    text
}
