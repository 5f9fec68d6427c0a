//! Slots in the memory of GPUs, mapped across the processes of one host.
//!
//! A pair of device slots accompanies a connection of another transport, usually
//! [`shm`](p2p_core::backend::shm). That connection carries liveness and messages between hosts.
//! Kernels of both sides move the data and the flags in the device slots without a host.
//!
//! The handshake of a connection makes a [`DevicePair`] if both sides bring a [`DeviceSide`]. These
//! are two slots whose content the services and their kernels define. Connected peers can also make
//! a [`DeviceChannel`]: two slots with host-driven rings. One sends the bytes of an [`Invitation`]
//! to the other for that. In both cases descriptors of the memory travel over a Unix socket, as
//! those of shared memory do, with the same check of the user.
//!
//! Flags are in the control tail of each slot, in GPU memory. Kernels poll their own memory and
//! need no access to the host's. A host reads flags by copies of about 10 µs each, so
//! [`DeviceChannel`] is for set-up, tests and tools and not for the data path. A host wakes its
//! peer after each frame without asking whether it sleeps, because asking would be a copy too.
//!
//! **Death.** The memory of a dead process stays allocated until all peers have unmapped it, and
//! stores into it remain harmless. To recover, stop launching towards the peer, let running kernels
//! reach their bound, and drop the channel. The peer's GPU memory is then free for its successor.
//! Dropping waits for this side's own copies only.

mod channel;
mod endpoint;
mod memory;
mod rendezvous;
mod share;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use kernels::abi::DevicePtr;
use kernels::gpu::{Gpu, GpuBuffer, GpuError};
use p2p_core::log_limit::LogLimit;
use thiserror::Error;
use tokio::net::UnixStream;
use tokio::time::timeout;

pub use channel::DeviceChannel;
pub use endpoint::DeviceEndpoint;
pub use kernels::slots::{DevicePair, DeviceSide, KernelWaits, PathError, RemoteSlots};
pub use memory::GpuMemory;
pub use share::{BlockShare, request_block};

use p2p_core::backend::shm::{ShmError, pass};
use p2p_core::channel::ChannelError;
use p2p_core::slot::SlotLayout;
use p2p_core::wait::event_fd;

use rendezvous::Rendezvous;

/// Device slots could not be made or exchanged.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The GPU reported an error.
    #[error("device slot: {0}")]
    Gpu(#[from] GpuError),
    /// The exchange of descriptors failed.
    #[error("device slot: {0}")]
    Exchange(#[from] ShmError),
    /// A system call failed.
    #[error("device slot: {call} failed: {source}")]
    System {
        /// Name of the call.
        call: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// The peer did not exchange its descriptors in time.
    #[error("device slot: the peer did not exchange its descriptors within {} ms", .limit.as_millis())]
    Timeout {
        /// The time limit.
        limit: Duration,
    },
    /// The rings have failed. Retire the channel.
    #[error(transparent)]
    Channel(#[from] ChannelError),
}

/// Bytes of an [`Invitation`], and of a [`BlockShare`], on the wire.
pub const INVITATION_BYTES: usize = 32;

/// A socket at which one peer exchanges descriptors with this process. Only a peer with the
/// invitation's bytes succeeds.
#[derive(Debug)]
pub struct Invitation(Rendezvous);

impl Invitation {
    /// Opens the socket. Requires a Tokio runtime.
    ///
    /// # Errors
    /// [`DeviceError::System`].
    pub fn open() -> Result<Self, DeviceError> {
        Rendezvous::open().map(Self)
    }

    /// The bytes to send to the peer. Send them to no other process.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; INVITATION_BYTES] {
        self.0.to_bytes()
    }

    /// Waits up to `limit` for the peer and joins both slots, each in its process's GPU.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub async fn accept(
        self,
        gpu: &Gpu,
        layout: SlotLayout,
        limit: Duration,
    ) -> Result<DeviceChannel, DeviceError> {
        let connected = timeout(limit, async {
            let own = create(gpu, layout).await?;
            loop {
                let accepted = self.0.listener.accept().await;
                let (stream, _) =
                    accepted.map_err(|source| DeviceError::System { call: "accept", source })?;
                // Another process cannot block the peer: without the nonce it gets no descriptor.
                if let Err(error) = pass::check_user(&stream) {
                    if let Some(num_suppressed) = STRANGER_LOG.allow() {
                        tracing::warn!(%error, num_suppressed, "refused a stranger's connection");
                    }
                    continue;
                }
                let received = timeout(limit / SHARE_OF_ONE, receive(&stream, &self.0.nonce)).await;
                let descriptors = match received.unwrap_or(Err(DeviceError::Timeout { limit })) {
                    Ok(descriptors) => descriptors,
                    Err(error) => {
                        if let Some(num_suppressed) = STRANGER_LOG.allow() {
                            tracing::warn!(%error, num_suppressed, "refused a connection that is not the peer's");
                        }
                        continue;
                    }
                };
                send(&stream, &self.0.nonce, &own).await?;
                break join(gpu, layout, own, descriptors).await;
            }
        });
        connected.await.unwrap_or(Err(DeviceError::Timeout { limit }))
    }
}

/// Connects to the peer that sent `invitation` and joins both slots, each in its process's GPU.
/// Waits up to `limit`.
///
/// # Errors
/// [`DeviceError`].
pub async fn connect(
    invitation: &[u8; INVITATION_BYTES],
    gpu: &Gpu,
    layout: SlotLayout,
    limit: Duration,
) -> Result<DeviceChannel, DeviceError> {
    let (token, nonce) = rendezvous::parse(invitation);
    let connected = timeout(limit, async {
        let own = create(gpu, layout).await?;
        let stream = pass::reach(&token).await?;
        send(&stream, &nonce, &own).await?;
        let descriptors = receive(&stream, &nonce).await?;
        join(gpu, layout, own, descriptors).await
    });
    connected.await.unwrap_or(Err(DeviceError::Timeout { limit }))
}

/// This process's slot in its GPU's memory, zeroed.
#[derive(Debug)]
pub struct DeviceSlot {
    memory: GpuBuffer,
    descriptor: OwnedFd,
    wake: Arc<OwnedFd>,
}

impl DeviceSlot {
    /// A fresh slot that a peer can map. GPUs allocate memory in pieces of 2 MiB.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn create(gpu: &Gpu, layout: &SlotLayout) -> Result<Self, DeviceError> {
        let memory = gpu.alloc_shared(layout.slot_bytes() as u64)?;
        let descriptor = memory.export()?;
        let wake = event_fd().map_err(|source| DeviceError::System { call: "eventfd", source })?;
        Ok(Self { memory, descriptor, wake: Arc::new(wake) })
    }

    /// Address, for kernels of this process.
    #[must_use]
    pub fn ptr(&self) -> DevicePtr {
        self.memory.ptr()
    }
}

async fn create(gpu: &Gpu, layout: SlotLayout) -> Result<DeviceSlot, DeviceError> {
    let gpu = gpu.clone();
    blocking(move || DeviceSlot::create(&gpu, &layout)).await
}

async fn send(
    stream: &UnixStream,
    nonce: &pass::Nonce,
    own: &DeviceSlot,
) -> Result<(), DeviceError> {
    Ok(pass::send(stream, nonce, [own.descriptor.as_fd(), own.wake.as_fd()]).await?)
}

async fn receive(
    stream: &UnixStream,
    nonce: &pass::Nonce,
) -> Result<pass::SlotDescriptors, DeviceError> {
    let descriptors = pass::receive(stream).await?;
    if descriptors.nonce != *nonce {
        let text = "what came belongs to another exchange".to_owned();
        return Err(ShmError::Rendezvous(text).into());
    }
    p2p_core::backend::shm::check_event(&descriptors.wake)?;
    Ok(descriptors)
}

async fn join(
    gpu: &Gpu,
    layout: SlotLayout,
    own: DeviceSlot,
    descriptors: pass::SlotDescriptors,
) -> Result<DeviceChannel, DeviceError> {
    let gpu = gpu.clone();
    blocking(move || {
        let peer = gpu.import_shared(descriptors.memory, layout.slot_bytes() as u64)?;
        let endpoint = DeviceEndpoint::new(
            gpu.stream()?,
            peer,
            layout.slot_bytes(),
            Arc::new(descriptors.wake),
            Arc::clone(&own.wake),
        );
        DeviceChannel::new(&gpu, layout, own, endpoint)
    })
    .await
}

/// Runs driver calls on a blocking thread: they take milliseconds while memory is mapped.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, DeviceError> + Send + 'static,
) -> Result<T, DeviceError> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| {
        Err(DeviceError::System { call: "spawn_blocking", source: io::Error::other(error) })
    })
}

/// Part of the time limit that one connection may take to identify itself.
const SHARE_OF_ONE: u32 = 4;

/// Processes of other users can cause these lines as often as they like.
static STRANGER_LOG: LogLimit = LogLimit::new();
