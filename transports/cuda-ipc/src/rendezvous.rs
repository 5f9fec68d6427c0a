//! Sockets at which processes of this host and user meet.

use p2p_core::backend::shm::pass;
use tokio::net::UnixListener;

use super::{DeviceError, INVITATION_BYTES};

/// A socket with a random name. A peer that knows the name and the nonce proves that it got the bytes.
#[derive(Debug)]
pub(super) struct Rendezvous {
    /// Name of the socket.
    token: pass::Nonce,
    pub(super) nonce: pass::Nonce,
    pub(super) listener: UnixListener,
}

impl Rendezvous {
    /// Opens the socket. Requires a Tokio runtime.
    pub(super) fn open() -> Result<Self, DeviceError> {
        let (token, nonce) = (rand::random(), rand::random());
        let listener =
            pass::listen(&token).map_err(|source| DeviceError::System { call: "bind", source })?;
        Ok(Self { token, nonce, listener })
    }

    /// The bytes for peers.
    pub(super) fn to_bytes(&self) -> [u8; INVITATION_BYTES] {
        let mut bytes = [0; INVITATION_BYTES];
        bytes[..16].copy_from_slice(&self.token);
        bytes[16..].copy_from_slice(&self.nonce);
        bytes
    }
}

/// The name of a peer's socket, and its nonce.
pub(super) fn parse(bytes: &[u8; INVITATION_BYTES]) -> (pass::Nonce, pass::Nonce) {
    let (mut token, mut nonce) = ([0; 16], [0; 16]);
    token.copy_from_slice(&bytes[..16]);
    nonce.copy_from_slice(&bytes[16..]);
    (token, nonce)
}
