//! Wake-ups between processes: a pipe that its owner sleeps on and never reads.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};

/// Makes a pipe to sleep on, and its number for the peer. One descriptor is both ends of the pipe, so that it
/// never appears closed, whatever the peer does.
pub(super) fn make() -> io::Result<(OwnedFd, u32)> {
    let (reader, _writer) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
    let both = open(std::process::id(), reader.as_raw_fd().cast_unsigned())?;
    let number = both.as_raw_fd().cast_unsigned();
    Ok((both, number))
}

/// The pipe that process `pid` has under descriptor `number`.
pub(super) fn open(pid: u32, number: u32) -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let path = format!("/proc/{pid}/fd/{number}");
    let kind = std::fs::read_link(&path)
        .map_err(|error| io::Error::new(error.kind(), format!("{path}: {error}")))?;
    if !kind.to_string_lossy().starts_with("pipe:[") {
        return Err(io::Error::other(format!("{path} is {}, not a pipe", kind.display())));
    }
    let pipe = rustix::fs::open(&path, flags, Mode::empty());
    pipe.map_err(|errno| io::Error::new(errno.kind(), format!("{path}: {errno}")))
}

/// Wakes the thread that sleeps on the pipe. Every call is a new event, because a woken thread first takes the
/// last event away; no other thread reads.
pub(super) fn wake(pipe: &OwnedFd) -> io::Result<()> {
    let mut old = [0; 64];
    while rustix::io::read(pipe, &mut old).is_ok_and(|num_bytes| num_bytes == old.len()) {}
    match rustix::io::write(pipe, &[1]) {
        // The pipe is full: another writer came first, and the owner has an event already.
        Ok(_) | Err(Errno::AGAIN) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}
