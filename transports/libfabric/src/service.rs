//! The thread that drives a device while no other thread does.

use std::io;
use std::sync::{Arc, Weak};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::device::Device;
use p2p_core::wait::Driver;

/// Starts the thread. It ends soon after the last owner of the device.
pub(super) fn start(device: &Arc<Device>) -> io::Result<()> {
    let device = Arc::downgrade(device);
    std::thread::Builder::new()
        .name("sy-libfabric".to_owned())
        .spawn(move || serve(&device))
        .map(drop)
}

fn serve(device: &Weak<Device>) {
    let mut last_seen = u64::MAX;
    loop {
        let Some(device) = device.upgrade() else { return };
        let (num_drives, is_watched) = device.attention();
        if device.has_credits() {
            // The thread that added them is not driving at the moment.
            device.flush_credits();
        }
        let nap = if is_watched {
            // Another thread sleeps on the descriptor or wakes often enough, and drives then.
            WATCHED_NAP
        } else if num_drives != last_seen {
            last_seen = num_drives;
            DRIVEN_NAP
        } else {
            device.drive();
            last_seen = device.attention().0;
            wait(&device)
        };
        drop(device);
        if !nap.is_zero() {
            std::thread::sleep(nap);
        }
    }
}

/// Blocks until the device may have work. Without a descriptor it returns at once, with the time to
/// sleep.
fn wait(device: &Device) -> Duration {
    let port = device.port();
    let Some(fd) = port.wait_fd() else { return device.max_sleep() };
    let longest = device.max_sleep().min(LONGEST_WAIT);
    if port.queue().may_sleep() {
        let timeout = Timespec {
            tv_sec: longest.as_secs().cast_signed(),
            tv_nsec: longest.subsec_nanos().into(),
        };
        // The result does not matter: the next round drives in any case.
        let _ = poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout));
    }
    Duration::ZERO
}

/// Intervals while another thread drives, and while another thread sleeps on the descriptor.
const DRIVEN_NAP: Duration = Duration::from_millis(5);
const WATCHED_NAP: Duration = Duration::from_millis(10);
/// Longest time that the device outlives its last owner.
const LONGEST_WAIT: Duration = Duration::from_millis(50);
