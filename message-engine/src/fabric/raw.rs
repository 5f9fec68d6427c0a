//! System calls on memory that a peer may write meanwhile. No slice may be formed over such memory.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Address and length, in the system's layout.
pub(super) use libc::iovec;

/// A part of the process's memory.
pub(super) const fn part(ptr: *const u8, bytes: usize) -> iovec {
    iovec { iov_base: ptr.cast_mut().cast(), iov_len: bytes }
}

/// Sends from `parts` as many bytes as the socket takes without blocking.
///
/// # Safety
/// Every part is readable memory of this process.
pub(super) unsafe fn send(fd: BorrowedFd<'_>, parts: &[iovec]) -> io::Result<usize> {
    let message = message(parts);
    // SAFETY: the parts are readable by the caller's promise, and the socket only reads them.
    let sent =
        unsafe { libc::sendmsg(fd.as_raw_fd(), &message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(sent as usize) }
}

/// Receives available bytes into `parts`, without blocking. Returns 0 if the peer has closed.
///
/// # Safety
/// Every part is writable memory of this process that nothing else in it holds a reference to.
pub(super) unsafe fn receive(fd: BorrowedFd<'_>, parts: &[iovec]) -> io::Result<usize> {
    let mut message = message(parts);
    // SAFETY: the parts are writable by the caller's promise.
    let got = unsafe { libc::recvmsg(fd.as_raw_fd(), &mut message, libc::MSG_DONTWAIT) };
    if got < 0 { Err(io::Error::last_os_error()) } else { Ok(got as usize) }
}

/// Copies between the memory of this process and of process `pid`, one range after the other. Returns the bytes copied.
/// They may be fewer than requested: then the first ranges are whole, and the last one is partial.
///
/// # Safety
/// Every range of `local` is memory of this process, writable unless `to_peer`.
pub(super) unsafe fn copy_across(
    pid: i32,
    to_peer: bool,
    local: &[iovec],
    remote: &[iovec],
) -> io::Result<usize> {
    let (num_local, num_remote) = (local.len() as libc::c_ulong, remote.len() as libc::c_ulong);
    let (local, remote) = (local.as_ptr(), remote.as_ptr());
    // SAFETY: the local ranges are valid by the caller's promise; the system checks the remote ones.
    let copied = unsafe {
        if to_peer {
            libc::process_vm_writev(pid, local, num_local, remote, num_remote, 0)
        } else {
            libc::process_vm_readv(pid, local, num_local, remote, num_remote, 0)
        }
    };
    if copied < 0 { Err(io::Error::last_os_error()) } else { Ok(copied as usize) }
}

fn message(parts: &[iovec]) -> libc::msghdr {
    // SAFETY: all zeros is an empty message header.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = parts.as_ptr().cast_mut();
    message.msg_iovlen = parts.len() as _;
    message
}
