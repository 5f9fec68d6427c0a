//! Unix sockets without a name in a file system: they pass the memory of rings between processes of one user.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};

use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, recvmsg, sendmsg,
};

/// Random name of a listener.
pub(super) type Name = [u8; 16];

/// Listens without blocking.
pub(super) fn listen(name: &Name) -> io::Result<UnixListener> {
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(text(name))?)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Connects to a listener of this host and checks its user. Does not block.
pub(super) fn connect(name: &Name) -> io::Result<OwnedFd> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new_abstract_name(text(name).as_bytes())?)?;
    check_user(&socket)?;
    Ok(socket)
}

/// Refuses a peer of another user, except root.
pub(super) fn check_user(socket: &OwnedFd) -> io::Result<()> {
    let found = socket_peercred(socket)?.uid;
    let expected = rustix::process::geteuid();
    if found == expected || found.is_root() {
        return Ok(());
    }
    let what = format!(
        "the peer runs as uid {}, this process as uid {}; run both as one user",
        found.as_raw(),
        expected.as_raw()
    );
    Err(io::Error::new(io::ErrorKind::PermissionDenied, what))
}

/// Passes a descriptor over a new connection.
pub(super) fn pass(socket: BorrowedFd<'_>, file: BorrowedFd<'_>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let files = [file];
    if !control.push(SendAncillaryMessage::ScmRights(&files)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    match sendmsg(socket, &[IoSlice::new(&[0])], &mut control, flags)? {
        1 => Ok(()),
        _ => Err(io::ErrorKind::WriteZero.into()),
    }
}

/// Takes the descriptor that the peer passes first. `None`: the peer has closed.
pub(super) fn take(socket: BorrowedFd<'_>) -> io::Result<Option<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let got = recvmsg(socket, &mut [IoSliceMut::new(&mut [0])], &mut control, flags)?;
    let mut passed = None;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(files) = message {
            passed = passed.or(files.last());
        }
    }
    match (got.bytes, passed) {
        (0, _) => Ok(None),
        (_, Some(file)) => Ok(Some(file)),
        _ => {
            let what = "the peer's first message has no descriptor";
            Err(io::Error::new(io::ErrorKind::InvalidData, what))
        }
    }
}

fn text(name: &Name) -> String {
    name.iter().fold("switchyard-engine-".to_owned(), |text, byte| format!("{text}{byte:02x}"))
}
