//! Posters and the proxy in processes of their own, and the death of either.

use crate::common;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::common::{
    Behaviour, LIMIT, Posters, Recorder, SLOT, config, driver, lanes, peer_config, wait_for,
};
use p2p_core::Region;
use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags, mmap};
use switchyard_proxy::abi::Status;
use switchyard_proxy::{LaneConfig, Lanes, Proxy};

const LANES: LaneConfig = LaneConfig { num_lanes: 2, depth: 64, budget: 64 };

/// Lanes in memory that another process can map.
fn shared_lanes(fd: &OwnedFd) -> Lanes {
    let bytes = LANES.bytes().unwrap().next_multiple_of(4096);
    // SAFETY: a fresh shared mapping, unmapped with the region.
    let region = unsafe {
        let flags = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        let ptr = mmap(std::ptr::null_mut(), bytes, flags.0, flags.1, fd, 0).unwrap();
        Region::from_raw(ptr.cast(), bytes).unwrap()
    };
    Lanes::new(Arc::new(region), LANES).unwrap()
}

fn memory() -> OwnedFd {
    let fd = rustix::fs::memfd_create("lanes", MemfdFlags::empty()).unwrap();
    rustix::fs::ftruncate(&fd, LANES.bytes().unwrap().next_multiple_of(4096) as u64).unwrap();
    fd
}

struct Other {
    child: Child,
    _stdin: ChildStdin,
    lines: std::io::Lines<BufReader<ChildStdout>>,
}

impl Other {
    /// This binary as its process `part`, with the lanes' memory.
    fn start(part: &str, fd: &OwnedFd) -> Self {
        // The child opens it by the number, which is inherited: memfds here are not closed on exec.
        let mut child = test_support::child::command(part)
            .arg(fd.as_raw_fd().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdin = child.stdin.take().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, _stdin: stdin, lines }
    }

    fn await_line(&mut self, text: &str) {
        assert!(self.lines.any(|line| line.is_ok_and(|line| line.contains(text))), "{text}");
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn commands_cross_and_a_poster_that_is_killed_concerns_nobody_else() {
    if driver().is_none() {
        return;
    }
    let fd = memory();
    let lanes = shared_lanes(&fd);
    let behaviour = Arc::new(Behaviour::default());
    let mirror = Region::anonymous(SLOT).unwrap();
    let proxy = Proxy::start(&config(1)).unwrap();
    let recorder = Recorder::new(Arc::clone(&behaviour), 0);
    let peer = proxy.add(recorder, peer_config(0, &lanes, &mirror)).unwrap();
    let mut other = Other::start("poster", &fd);
    // In the middle of its work.
    wait_for("commands", || behaviour.num_asked.load(Ordering::SeqCst) > 10_000);
    other.child.kill().unwrap();
    other.child.wait().unwrap();
    let mut last = 0;
    wait_for("the end of what was posted", || {
        std::thread::sleep(Duration::from_millis(2));
        let now = behaviour.num_asked.load(Ordering::SeqCst);
        std::mem::replace(&mut last, now) == now
    });
    {
        // Each once and in order, up to the death.
        let asked = behaviour.asked.lock().unwrap();
        for (number, entry) in asked.iter().enumerate() {
            assert_eq!(*entry, common::Asked::Add { offset: 8, value: number as u64 });
        }
    }
    // Half a command may have been left; the thread serves all other peers.
    let own = self::lanes(1, 16, 16);
    let others = Arc::new(Behaviour::default());
    let config = peer_config(1, &own, &mirror);
    let _own = proxy.add(Recorder::new(Arc::clone(&others), 0), config).unwrap();
    let mut poster = own.poster(0);
    poster.try_post(&switchyard_proxy::Command::new(switchyard_proxy::Opcode::Quiet)).unwrap();
    wait_for("the own command", || poster.completed() == 1);
    assert!(!peer.has_failed());
}

#[test]
fn a_proxy_that_is_killed_is_waited_for_no_longer_than_allowed() {
    let Some(driver) = driver() else { return };
    let fd = memory();
    let lanes = shared_lanes(&fd);
    let mirror = Region::anonymous(SLOT).unwrap();
    let mut other = Other::start("proxy", &fd);
    other.await_line("serving");
    // A proxy that lives answers sooner, however busy the machine is.
    let posters = Posters::new(driver, &lanes, &mirror, Duration::from_secs(10));
    for _ in 0..1000 {
        assert_eq!(posters.add(0, 8, 1), Status::Ok as u32);
    }
    assert_eq!(posters.quiet(0), Status::Ok as u32);
    other.child.kill().unwrap();
    other.child.wait().unwrap();
    let mut status = 0;
    for _ in 0..1000 {
        status = posters.add(0, 8, 1);
        if status != Status::Ok as u32 {
            break;
        }
    }
    assert_eq!(status, Status::Timeout as u32);
    assert_eq!((posters.error.tag, posters.error.reason), (48, 1));
    assert_eq!(posters.quiet(1), Status::Timeout as u32);
}

/// The lanes of the parent, and a mirror of its own, in the other process.
fn inherited() -> (Lanes, Region) {
    let fd: i32 = std::env::args().nth(1).unwrap().parse().unwrap();
    // SAFETY: inherited from the parent for this purpose, without another owner here.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    (shared_lanes(&fd), Region::anonymous(SLOT).unwrap())
}

/// A process that posts until it is killed or the lanes fail.
pub fn poster() {
    let (lanes, mirror) = inherited();
    let posters = Posters::new(driver().unwrap(), &lanes, &mirror, LIMIT);
    for number in 0.. {
        if posters.add(0, 8, number) != 0 {
            return;
        }
    }
}

/// A process that serves the lanes.
pub fn proxy() {
    let (lanes, mirror) = inherited();
    let proxy = Proxy::start(&config(1)).unwrap();
    let recorder = Recorder::new(Arc::new(Behaviour::default()), 0);
    let _peer = proxy.add(recorder, peer_config(0, &lanes, &mirror)).unwrap();
    println!("serving");
    std::io::stdout().flush().unwrap();
    // Until it is killed, or its parent is.
    let _ = std::io::stdin().lines().next();
}
