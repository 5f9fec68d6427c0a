//! A NIC that makes progress on a thread of its own.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::nic::Nic;

/// A running NIC. It stops when dropped.
#[derive(Debug)]
pub struct NicThread {
    nic: Arc<Mutex<Nic>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl NicThread {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system's.
    pub fn spawn(nic: Nic) -> std::io::Result<Self> {
        let nic = Arc::new(Mutex::new(nic));
        let stop = Arc::new(AtomicBool::new(false));
        let thread = {
            let (nic, stop) = (Arc::clone(&nic), Arc::clone(&stop));
            std::thread::Builder::new()
                .name("softnic".to_owned())
                .spawn(move || run(&nic, &stop))?
        };
        Ok(Self { nic, stop, thread: Some(thread) })
    }

    /// The NIC, between two steps.
    pub fn lock(&self) -> MutexGuard<'_, Nic> {
        self.nic.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for NicThread {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of a software NIC panicked");
        }
    }
}

fn run(nic: &Mutex<Nic>, stop: &AtomicBool) {
    let mut num_idle = 0u32;
    while !stop.load(Ordering::Relaxed) {
        let work = nic.lock().unwrap_or_else(PoisonError::into_inner).progress();
        num_idle = if work == 0 { num_idle.saturating_add(1) } else { 0 };
        // Lets another thread take the lock. An idle NIC costs next to nothing.
        if num_idle < SPINS {
            std::thread::yield_now();
        } else {
            std::thread::sleep(IDLE_SLEEP);
        }
    }
}

const SPINS: u32 = 500;
const IDLE_SLEEP: Duration = Duration::from_micros(50);
