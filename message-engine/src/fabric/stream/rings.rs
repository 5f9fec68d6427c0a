//! Two rings of bytes in memory that two processes share, one for each direction.
//!
//! The connecting side makes the memory, sealed against resizing, and passes it over a Unix socket. A byte in the socket
//! wakes a side that has found no bytes or no room. The end of the socket is the end of the connection.
//!
//! ```text
//! 0        per direction, 512 bytes: head (bytes written), tail (bytes read), reader waits, writer waits;
//!          each in 128 bytes of its own
//! 4096     per direction, 256 KiB: the ring
//! ```
//!
//! SYNC POINT: ring-bytes. The writer stores bytes and then `head` (release); the reader loads `head` (acquire) and then
//! bytes. The same holds for `tail` and room.
//!
//! SYNC POINT: ring-wake. A side sets its `waits` and then loads the other's counter. The other stores its counter and
//! then loads `waits`. Both have a full fence between, so the side finds the bytes, or the other wakes it.
//!
//! Each side keeps its own counters in its own memory. A counter of the peer that cannot be right ends the connection.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use rustix::fs::{
    MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create,
};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use rustix::net::{RecvFlags, SendFlags};

use super::unix;
use crate::fabric::raw;
use p2p_core::region::Region;

/// One end.
#[derive(Debug)]
pub(super) struct Rings {
    socket: Arc<OwnedFd>,
    /// `None` until the peer's message with the memory has arrived.
    map: Option<Region>,
    /// Whether this side has made the memory. Its bytes go through the first ring.
    is_maker: bool,
    /// Bytes written and read by this side.
    written: u64,
    read: u64,
    /// Whether the last call for that found no room, or no bytes.
    waits_for_room: bool,
    waits_for_bytes: bool,
}

impl Rings {
    /// Makes the memory, and passes it to the peer at the other end of `socket`, which does not block.
    pub(super) fn make(socket: Arc<OwnedFd>) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("switchyard-rings", flags)?;
        ftruncate(&file, MAP_BYTES as u64)?;
        fcntl_add_seals(&file, SEALS)?;
        let map = map(&file)?;
        unix::pass(socket.as_fd(), file.as_fd())?;
        Ok(Self { map: Some(map), is_maker: true, ..Self::accept(socket) })
    }

    /// The end of a peer that passes the memory over `socket`, which does not block.
    pub(super) const fn accept(socket: Arc<OwnedFd>) -> Self {
        Self {
            socket,
            map: None,
            is_maker: false,
            written: 0,
            read: 0,
            waits_for_room: false,
            waits_for_bytes: false,
        }
    }

    pub(super) const fn socket(&self) -> &Arc<OwnedFd> {
        &self.socket
    }

    /// Whether the peer has made room, or written bytes, since a call found none. Its wake-up may be spent: a call for
    /// the one takes the wake-ups for both out of the socket.
    pub(super) fn has_changed(&self) -> bool {
        let Some(map) = &self.map else { return false };
        let is_spent = |waits: &AtomicU32| waits.load(Ordering::Acquire) == 0;
        self.waits_for_room && is_spent(Ring::new(map, !self.is_maker).writer_waits())
            || self.waits_for_bytes && is_spent(Ring::new(map, self.is_maker).reader_waits())
    }

    /// As [`Carrier::send`](super::carrier::Carrier::send).
    ///
    /// # Safety
    /// Every part is readable memory of this process.
    pub(super) unsafe fn send(&mut self, parts: &[raw::iovec]) -> io::Result<usize> {
        let Some(map) = &self.map else { return Err(io::ErrorKind::WouldBlock.into()) };
        let ring = Ring::new(map, !self.is_maker);
        self.waits_for_room = false;
        let mut moved = 0;
        for part in parts {
            let mut done = 0;
            while done < part.iov_len {
                let room = ring.room(self.written)?;
                if room == 0 {
                    // All wake-ups before this one are spent.
                    if drain(self.socket.as_fd())? {
                        return Err(io::ErrorKind::BrokenPipe.into());
                    }
                    ring.writer_waits().store(1, Ordering::Relaxed);
                    // SYNC POINT: ring-wake.
                    fence(Ordering::SeqCst);
                    if ring.room(self.written)? > 0 {
                        continue;
                    }
                    self.waits_for_room = true;
                    return if moved > 0 {
                        Ok(moved)
                    } else {
                        Err(io::ErrorKind::WouldBlock.into())
                    };
                }
                let at = self.written as usize % RING_BYTES;
                let bytes = room.min(part.iov_len - done).min(RING_BYTES - at).min(PIECE_BYTES);
                // SAFETY: the range lies in the ring and is free, so the peer does not read it. The source is readable
                // by the caller's promise.
                unsafe {
                    let from = part.iov_base.cast::<u8>().cast_const().add(done);
                    std::ptr::copy_nonoverlapping(from, ring.at(at), bytes);
                }
                (done, moved) = (done + bytes, moved + bytes);
                self.written += bytes as u64;
                // SYNC POINT: ring-bytes.
                ring.head().store(self.written, Ordering::Release);
                wake(ring.reader_waits(), self.socket.as_fd())?;
            }
        }
        Ok(moved)
    }

    /// As [`Carrier::receive`](super::carrier::Carrier::receive).
    ///
    /// # Safety
    /// Every part is writable memory of this process that nothing else in it holds a reference to.
    pub(super) unsafe fn receive(&mut self, parts: &[raw::iovec]) -> io::Result<usize> {
        if self.map.is_none() {
            let Some(file) = unix::take(self.socket.as_fd())? else { return Ok(0) };
            self.map = Some(open(&file)?);
        }
        let Some(map) = &self.map else { return Ok(0) };
        let ring = Ring::new(map, self.is_maker);
        self.waits_for_bytes = false;
        let mut left = ring.filled(self.read)?;
        if left == 0 {
            let has_ended = drain(self.socket.as_fd())?;
            ring.reader_waits().store(1, Ordering::Relaxed);
            // SYNC POINT: ring-wake.
            fence(Ordering::SeqCst);
            left = ring.filled(self.read)?;
            if left == 0 {
                self.waits_for_bytes = true;
                return if has_ended { Ok(0) } else { Err(io::ErrorKind::WouldBlock.into()) };
            }
        }
        let mut moved = 0;
        for part in parts {
            let mut done = 0;
            while done < part.iov_len && left > 0 {
                let at = self.read as usize % RING_BYTES;
                let bytes = left.min(part.iov_len - done).min(RING_BYTES - at).min(PIECE_BYTES);
                // SAFETY: the range lies in the ring. A correct peer does not write it before `tail` says that it was
                // read; another one garbles its own bytes. The target is writable by the caller's promise.
                unsafe {
                    let to = part.iov_base.cast::<u8>().add(done);
                    std::ptr::copy_nonoverlapping(ring.at(at).cast_const(), to, bytes);
                }
                (done, moved, left) = (done + bytes, moved + bytes, left - bytes);
                self.read += bytes as u64;
                // SYNC POINT: ring-bytes.
                ring.tail().store(self.read, Ordering::Release);
                wake(ring.writer_waits(), self.socket.as_fd())?;
            }
        }
        Ok(moved)
    }
}

/// One direction.
struct Ring<'a> {
    map: &'a Region,
    is_second: bool,
}

impl<'a> Ring<'a> {
    const fn new(map: &'a Region, is_second: bool) -> Self {
        Self { map, is_second }
    }

    /// Bytes that the writer may write, who has written `written`.
    fn room(&self, written: u64) -> io::Result<usize> {
        // SYNC POINT: ring-bytes.
        let used = written.wrapping_sub(self.tail().load(Ordering::Acquire));
        if used > RING_BYTES as u64 { Err(garbled()) } else { Ok(RING_BYTES - used as usize) }
    }

    /// Bytes that the reader may read, who has read `read`.
    fn filled(&self, read: u64) -> io::Result<usize> {
        // SYNC POINT: ring-bytes.
        let filled = self.head().load(Ordering::Acquire).wrapping_sub(read);
        if filled > RING_BYTES as u64 { Err(garbled()) } else { Ok(filled as usize) }
    }

    fn head(&self) -> &AtomicU64 {
        // SAFETY: inside the mapping, aligned, and only ever reached by atomics.
        unsafe { AtomicU64::from_ptr(self.word(0).cast()) }
    }

    fn tail(&self) -> &AtomicU64 {
        // SAFETY: as above.
        unsafe { AtomicU64::from_ptr(self.word(1).cast()) }
    }

    fn reader_waits(&self) -> &AtomicU32 {
        // SAFETY: as above.
        unsafe { AtomicU32::from_ptr(self.word(2).cast()) }
    }

    fn writer_waits(&self) -> &AtomicU32 {
        // SAFETY: as above.
        unsafe { AtomicU32::from_ptr(self.word(3).cast()) }
    }

    fn word(&self, nth: usize) -> *mut u8 {
        let offset = usize::from(self.is_second) * HEAD_BYTES + nth * WORD_BYTES;
        // SAFETY: inside the mapping: two directions of four words are shorter than a page.
        unsafe { self.map.as_ptr().as_ptr().add(offset) }
    }

    /// Address of a byte of the ring.
    fn at(&self, at: usize) -> *mut u8 {
        debug_assert!(at < RING_BYTES);
        let offset = RINGS_AT + usize::from(self.is_second) * RING_BYTES + at;
        // SAFETY: inside the mapping.
        unsafe { self.map.as_ptr().as_ptr().add(offset) }
    }
}

/// Wakes the peer if it waits. The caller has stored its counter.
fn wake(waits: &AtomicU32, socket: BorrowedFd<'_>) -> io::Result<()> {
    // SYNC POINT: ring-wake.
    fence(Ordering::SeqCst);
    if waits.load(Ordering::Relaxed) == 0 {
        return Ok(());
    }
    waits.store(0, Ordering::Relaxed);
    match rustix::net::send(socket, &[1], SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
        // A full socket has bytes that wake the peer.
        Ok(_) | Err(rustix::io::Errno::AGAIN) => Ok(()),
        // Bytes of a peer that has gone can still be read. The reader finds the end behind them.
        Err(rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// Takes the peer's wake-ups out of the socket. Returns whether the peer has closed it.
fn drain(socket: BorrowedFd<'_>) -> io::Result<bool> {
    let mut bytes = [0u8; 64];
    loop {
        match rustix::net::recv(socket, &mut bytes, RecvFlags::DONTWAIT) {
            Ok((_, 0)) | Err(rustix::io::Errno::CONNRESET) => return Ok(true),
            // Others may be there: they wake this side once more, which is harmless.
            Ok((_, got)) if got < bytes.len() => return Ok(false),
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::AGAIN) => return Ok(false),
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Maps the memory that the peer has made.
fn open(file: &OwnedFd) -> io::Result<Region> {
    // Only a sealed size cannot change. An access beyond the end of a file would kill this process.
    let seals = fcntl_get_seals(file)?;
    if !seals.contains(SEALS) || fstat(file)?.st_size != MAP_BYTES as i64 {
        let what = "the peer's rings have another size, or are not sealed against resizing";
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    map(file)
}

fn map(file: &OwnedFd) -> io::Result<Region> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh mapping at an address that the kernel chooses aliases nothing.
    let ptr =
        unsafe { mmap(std::ptr::null_mut(), MAP_BYTES, protection, MapFlags::SHARED, file, 0) }?;
    // SAFETY: just mapped whole, and nothing else unmaps it.
    unsafe { Region::from_raw(ptr.cast(), MAP_BYTES) }
        .ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

fn garbled() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the peer's ring has an impossible counter")
}

/// Seals that forbid resizing the memory.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);
const WORD_BYTES: usize = 128;
const HEAD_BYTES: usize = 4 * WORD_BYTES;
const RINGS_AT: usize = 4096;
/// Bytes of one ring: a part of a second-level cache.
const RING_BYTES: usize = 256 << 10;
const MAP_BYTES: usize = RINGS_AT + 2 * RING_BYTES;
/// Bytes after which the other side may start on them.
const PIECE_BYTES: usize = 32 << 10;
const _: () = assert!(2 * HEAD_BYTES <= RINGS_AT && RING_BYTES.is_power_of_two());

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::time::Duration;

    use rand::rngs::StdRng;
    use rand::{Rng, RngExt, SeedableRng};
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    fn sockets() -> [Arc<OwnedFd>; 2] {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (a, b) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        [Arc::new(a), Arc::new(b)]
    }

    fn pair() -> (Rings, Rings) {
        let [a, b] = sockets();
        (Rings::make(a).unwrap(), Rings::accept(b))
    }

    fn send(rings: &mut Rings, bytes: &[u8]) -> io::Result<usize> {
        let middle = bytes.len() / 3;
        let parts = [&bytes[..middle], &bytes[middle..]];
        // SAFETY: the parts are slices.
        unsafe { rings.send(&parts.map(|part| raw::part(part.as_ptr(), part.len()))) }
    }

    fn receive(rings: &mut Rings, bytes: &mut [u8]) -> io::Result<usize> {
        let (one, two) = bytes.split_at_mut(bytes.len() / 2);
        let parts = [raw::part(one.as_ptr(), one.len()), raw::part(two.as_ptr(), two.len())];
        // SAFETY: the parts are slices that nothing else uses meanwhile.
        unsafe { rings.receive(&parts) }
    }

    /// Sleeps until the peer wakes this side. A lost wake-up fails the test.
    fn sleep(rings: &Rings) {
        let mut fds =
            [libc::pollfd { fd: rings.socket.as_raw_fd(), events: libc::POLLIN, revents: 0 }];
        // SAFETY: one descriptor of ours.
        let num = unsafe { libc::poll(fds.as_mut_ptr(), 1, 60_000) };
        assert_eq!(num, 1, "no wake-up");
    }

    /// Both threads sleep whenever they find nothing, so every wake-up is needed.
    #[test]
    fn bytes_arrive_in_order_and_no_wake_up_is_lost() {
        let seed: u64 = rand::random();
        println!("seed {seed}");
        let mut rng = StdRng::seed_from_u64(seed);
        let mut bytes = vec![0u8; 20 << 20];
        rng.fill_bytes(&mut bytes);
        for back in [false, true] {
            let (a, b) = pair();
            let (mut from, mut to) = if back { (b, a) } else { (a, b) };
            if back {
                let mut none = [0; 4];
                let empty = receive(&mut from, &mut none).unwrap_err();
                assert_eq!(empty.kind(), io::ErrorKind::WouldBlock);
            }
            let steps: Vec<usize> = (0..64).map(|_| rng.random_range(1..300_000)).collect();
            let (sent, step) = (&bytes, &steps);
            let mut got = vec![0xa5u8; bytes.len()];
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    let (mut done, mut nth) = (0, 0);
                    while done < sent.len() {
                        let end = sent.len().min(done + step[nth % step.len()]);
                        match send(&mut from, &sent[done..end]) {
                            Ok(moved) => done += moved,
                            Err(error) => {
                                assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
                                sleep(&from);
                            }
                        }
                        nth += 1;
                        if nth % 16 == 0 {
                            std::thread::sleep(Duration::from_micros(50));
                        }
                    }
                });
                let mut done = 0;
                while done < got.len() {
                    let end = got.len().min(done + step[done % step.len()]);
                    match receive(&mut to, &mut got[done..end]) {
                        Ok(moved) => {
                            assert!(moved > 0, "the end came too early");
                            done += moved;
                        }
                        Err(error) => {
                            assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
                            sleep(&to);
                        }
                    }
                }
            });
            assert!(got == bytes);
        }
    }

    #[test]
    fn the_end_comes_behind_the_last_bytes() {
        let (mut a, mut b) = pair();
        assert_eq!(send(&mut a, &[7; 9]).unwrap(), 9);
        drop(a);
        let mut bytes = [0; 16];
        assert_eq!(receive(&mut b, &mut bytes).unwrap(), 9);
        assert_eq!(bytes[..9], [7; 9]);
        assert_eq!(receive(&mut b, &mut bytes).unwrap(), 0);
    }

    #[test]
    fn impossible_counters_end_the_connection() {
        for (written, read) in [(RING_BYTES as u64 + 1, 0), (0, 1), (u64::MAX, 5)] {
            let (mut a, mut b) = pair();
            assert!(receive(&mut b, &mut [0; 1]).is_err());
            let map = a.map.clone().unwrap();
            Ring::new(&map, false).head().store(written, Ordering::SeqCst);
            Ring::new(&map, false).tail().store(read, Ordering::SeqCst);
            if written > 0 {
                let error = receive(&mut b, &mut [0; 64]).unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::InvalidData);
            }
            if read > 0 {
                assert_eq!(send(&mut a, &[1]).unwrap_err().kind(), io::ErrorKind::InvalidData);
            }
        }
    }

    #[test]
    fn memory_whose_size_may_change_is_refused() {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        for (bytes, seals) in [
            (MAP_BYTES as u64, SealFlags::SHRINK),
            (MAP_BYTES as u64 - 4096, SEALS),
            (MAP_BYTES as u64, SEALS),
        ] {
            let file = memfd_create("test", flags).unwrap();
            ftruncate(&file, bytes).unwrap();
            fcntl_add_seals(&file, seals).unwrap();
            let [a, b] = sockets();
            unix::pass(a.as_fd(), file.as_fd()).unwrap();
            let error = receive(&mut Rings::accept(b), &mut [0; 1]).unwrap_err();
            let is_sound = bytes == MAP_BYTES as u64 && seals == SEALS;
            let expected =
                if is_sound { io::ErrorKind::WouldBlock } else { io::ErrorKind::InvalidData };
            assert_eq!(error.kind(), expected);
        }
    }
}
