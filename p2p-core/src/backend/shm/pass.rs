//! Passes descriptors over a Unix socket: one message with one nonce and a fixed number of descriptors.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener as StdUnixListener};
use std::time::Duration;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg,
};
use tokio::io::Interest;
use tokio::net::{UnixListener, UnixStream};

use super::ShmError;

/// Bytes that identify the handshake of a message.
pub type Nonce = [u8; 16];

/// The content of one message.
#[derive(Debug)]
pub struct SlotDescriptors {
    /// Identifies the handshake.
    pub nonce: Nonce,
    /// The slot's memory.
    pub memory: OwnedFd,
    /// Event descriptor that wakes the sender.
    pub wake: OwnedFd,
}

/// Listens on the abstract name for `token`. It has no entry in a file system.
pub fn listen(token: &Nonce) -> io::Result<UnixListener> {
    let listener = StdUnixListener::bind_addr(&address(token)?)?;
    listener.set_nonblocking(true)?;
    UnixListener::from_std(listener)
}

/// Connects to the listener for `token`, and checks its user. Waits without a limit; the caller sets one.
pub async fn reach(token: &Nonce) -> Result<UnixStream, ShmError> {
    let failed = |what: &str, e: io::Error| {
        ShmError::Rendezvous(format!(
            "{what}: {e}; the peer is not reachable by an abstract Unix socket although it reports the same host and network namespace"
        ))
    };
    let address = address(token).map_err(|e| failed("address", e))?;
    let stream = loop {
        let socket = rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::NONBLOCK | SocketFlags::CLOEXEC,
            None,
        )
        .map_err(|e| failed("socket", e.into()))?;
        let name = rustix::net::SocketAddrUnix::new_abstract_name(
            address.as_abstract_name().unwrap_or_default(),
        )
        .map_err(|e| failed("address", e.into()))?;
        match rustix::net::connect(&socket, &name) {
            Ok(()) => break std::os::unix::net::UnixStream::from(socket),
            // The backlog is full. A Unix socket reports no event for this, so retry after a pause.
            Err(rustix::io::Errno::AGAIN) => tokio::time::sleep(Duration::from_millis(2)).await,
            Err(errno) => return Err(failed("connect", errno.into())),
        }
    };
    let stream = UnixStream::from_std(stream).map_err(|e| failed("register", e))?;
    check_user(&stream)?;
    Ok(stream)
}

/// Rejects a peer of another user. Root may connect to every user.
pub fn check_user(stream: &UnixStream) -> Result<(), ShmError> {
    let found =
        stream.peer_cred().map_err(|e| ShmError::Rendezvous(format!("SO_PEERCRED: {e}")))?.uid();
    let expected = rustix::process::geteuid().as_raw();
    if found == expected || found == 0 {
        return Ok(());
    }
    Err(ShmError::Rendezvous(format!(
        "the peer runs as uid {found}, this process as uid {expected}; run both as one user or choose another transport"
    )))
}

/// Sends `nonce` and the descriptors, at most `MAX_DESCRIPTORS`.
pub async fn send<const N: usize>(
    stream: &UnixStream,
    nonce: &Nonce,
    fds: [BorrowedFd<'_>; N],
) -> Result<(), ShmError> {
    stream
        .async_io(Interest::WRITABLE, || {
            let mut space =
                [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !control.push(SendAncillaryMessage::ScmRights(&fds)) {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            let sent = sendmsg(
                stream.as_fd(),
                &[IoSlice::new(nonce)],
                &mut control,
                SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
            )?;
            // A Unix stream accepts such a short message as a whole or not at all.
            if sent == nonce.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
        })
        .await
        .map_err(|e| ShmError::Rendezvous(format!("sending descriptors: {e}")))
}

/// Receives one message with the descriptors of a slot. Waits without a limit; the caller sets one.
pub async fn receive(stream: &UnixStream) -> Result<SlotDescriptors, ShmError> {
    let (nonce, [memory, wake]) = receive_exactly(stream).await?;
    Ok(SlotDescriptors { nonce, memory, wake })
}

/// Receives one message with `N` descriptors, at most `MAX_DESCRIPTORS`. Waits without a limit; the caller sets one.
pub async fn receive_exactly<const N: usize>(
    stream: &UnixStream,
) -> Result<(Nonce, [OwnedFd; N]), ShmError> {
    let mut nonce = [0u8; 16];
    let (len, fds) = stream
        .async_io(Interest::READABLE, || {
            let mut space =
                [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let got = recvmsg(
                stream.as_fd(),
                &mut [IoSliceMut::new(&mut nonce)],
                &mut control,
                RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT,
            )?;
            let mut fds: Vec<OwnedFd> = Vec::with_capacity(MAX_DESCRIPTORS);
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = message {
                    fds.extend(rights);
                }
            }
            Ok((got.bytes, fds))
        })
        .await
        .map_err(|e| ShmError::Rendezvous(format!("receiving descriptors: {e}")))?;
    let num_fds = fds.len();
    match (len, <[OwnedFd; N]>::try_from(fds)) {
        (16, Ok(fds)) => Ok((nonce, fds)),
        (0, _) => Err(ShmError::Rendezvous("the peer closed it".to_owned())),
        _ => Err(ShmError::Rendezvous(format!(
            "the peer sent {len} bytes with {num_fds} descriptors, expected 16 bytes with {N}"
        ))),
    }
}

fn address(token: &Nonce) -> io::Result<SocketAddr> {
    let mut name = String::with_capacity(48);
    name.push_str("switchyard-");
    for byte in token {
        name.push_str(&format!("{byte:02x}"));
    }
    SocketAddr::from_abstract_name(name)
}

/// Maximum number of descriptors in a message.
const MAX_DESCRIPTORS: usize = 2;
