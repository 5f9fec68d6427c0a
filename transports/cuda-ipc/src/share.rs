//! Blocks of GPU memory that other processes of this host map by their numbers.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use p2p_core::backend::shm::{ShmError, pass};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::rendezvous::{self, Rendezvous};
use super::{DeviceError, INVITATION_BYTES, STRANGER_LOG};

/// A socket at which processes of this host and user get descriptors of memory. Only a process with the
/// [bytes](Self::to_bytes) of the share gets any.
#[derive(Debug)]
pub struct BlockShare(Rendezvous);

impl BlockShare {
    /// Opens the socket. Requires a Tokio runtime.
    ///
    /// # Errors
    /// [`DeviceError::System`].
    pub fn open() -> Result<Self, DeviceError> {
        Rendezvous::open().map(Self)
    }

    /// The bytes for peers. A process that has them can map every block.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; INVITATION_BYTES] {
        self.0.to_bytes()
    }

    /// Serves peers until the future is dropped. `find` gives a block's descriptor and its length in bytes.
    pub async fn serve(self, find: impl Fn(u64) -> Option<(OwnedFd, u64)> + Send + Sync + 'static) {
        let (find, open) = (Arc::new(find), Arc::new(Semaphore::new(MOST_AT_ONCE)));
        let nonce = self.0.nonce;
        loop {
            // Never closed, so it cannot fail.
            let Ok(permit) = Arc::clone(&open).acquire_owned().await else { return };
            let stream = match self.0.listener.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::warn!(%error, "cannot take a connection of a process that maps memory");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let find = Arc::clone(&find);
            tokio::spawn(async move {
                let _permit = permit;
                let answered = timeout(LIMIT, answer(stream, &nonce, &*find)).await;
                if let Err(error) = answered.unwrap_or(Err(DeviceError::Timeout { limit: LIMIT }))
                    && let Some(num_suppressed) = STRANGER_LOG.allow()
                {
                    tracing::warn!(%error, num_suppressed, "a process got no memory to map");
                }
            });
        }
    }
}

/// Gets the descriptor of a block, and its length, from the process that sent the bytes of its share. Waits up to
/// `limit`.
///
/// # Errors
/// [`DeviceError`] if the process is gone, refuses, or has no such block.
pub async fn request_block(
    share: &[u8; INVITATION_BYTES],
    block: u64,
    limit: Duration,
) -> Result<(OwnedFd, u64), DeviceError> {
    let (token, nonce) = rendezvous::parse(share);
    let mut request = [0; REQUEST_BYTES];
    request[..16].copy_from_slice(&nonce);
    request[16..].copy_from_slice(&block.to_le_bytes());
    let requested = timeout(limit, async {
        let mut stream = pass::reach(&token).await?;
        let written = stream.write_all(&request).await;
        written.map_err(|source| DeviceError::System { call: "write", source })?;
        let (reply, [descriptor]) = pass::receive_exactly::<1>(&stream).await?;
        let (words, _) = reply.as_chunks::<8>();
        if words.first().copied().map(u64::from_le_bytes) != Some(block) {
            return Err(ShmError::Rendezvous("another block came".to_owned()).into());
        }
        Ok((descriptor, words.get(1).copied().map_or(0, u64::from_le_bytes)))
    });
    requested.await.unwrap_or(Err(DeviceError::Timeout { limit }))
}

async fn answer(
    mut stream: UnixStream,
    nonce: &pass::Nonce,
    find: &(dyn Fn(u64) -> Option<(OwnedFd, u64)> + Sync),
) -> Result<(), DeviceError> {
    pass::check_user(&stream)?;
    let mut request = [0; REQUEST_BYTES];
    let read = stream.read_exact(&mut request).await;
    read.map_err(|source| DeviceError::System { call: "read", source })?;
    let (words, _) = request.as_chunks::<8>();
    let [first, second, block] = [0, 1, 2].map(|idx| words[idx]);
    if [first, second].concat() != nonce {
        return Err(ShmError::Rendezvous("it does not belong to this share".to_owned()).into());
    }
    let number = u64::from_le_bytes(block);
    let Some((descriptor, bytes)) = find(number) else {
        return Err(ShmError::Rendezvous(format!("there is no block {number}")).into());
    };
    let mut reply = [0; 16];
    reply[..8].copy_from_slice(&block);
    reply[8..].copy_from_slice(&bytes.to_le_bytes());
    Ok(pass::send(&stream, &reply, [descriptor.as_fd()]).await?)
}

/// The share's nonce, and the number of a block.
const REQUEST_BYTES: usize = 24;
/// Longest time of one request.
const LIMIT: Duration = Duration::from_secs(5);
/// Pause after a failed accept, which is usually a lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
const MOST_AT_ONCE: usize = 64;
