//! Both peers in one process: the same rings and flags over plain memory. For tests, and for a client and a server that
//! share a process.

use std::io;
use std::sync::Arc;

use thiserror::Error;

use super::mapped::MappedEndpoint;
#[cfg(feature = "test-transports")]
use super::staged::{Disorder, StagedEndpoint};
use crate::channel::{Channel, ChannelError};
use crate::endpoint::{Transport, TransportKind};
use crate::region::{MapError, Region, SlotKey};
use crate::slot::{SlotConfig, SlotConfigError, SlotLayout};
use crate::wait::event_fd;

/// [`pair`] could not make two channels.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LocalPairError {
    /// The slot configuration is invalid.
    #[error(transparent)]
    Config(#[from] SlotConfigError),
    /// No memory for the slots.
    #[error(transparent)]
    Map(#[from] MapError),
    /// The system gives no event descriptor.
    #[error("cannot create an event descriptor: {0}")]
    Event(#[from] io::Error),
    /// A channel rejected its slot.
    #[error(transparent)]
    Channel(#[from] ChannelError),
}

/// Two connected channels in this process.
///
/// # Errors
/// [`LocalPairError`] if the configuration is invalid or the system is out of resources.
pub fn pair(
    config: SlotConfig,
) -> Result<(Channel<MappedEndpoint>, Channel<MappedEndpoint>), LocalPairError> {
    joined(config, |endpoint| endpoint)
}

/// Two connected channels in this process that transfer frames by put only. Puts are reordered by `disorder` if given.
///
/// # Errors
/// [`LocalPairError`] if the configuration is invalid or the system is out of resources.
#[cfg(feature = "test-transports")]
pub fn staged_pair(
    config: SlotConfig,
    disorder: Option<Disorder>,
) -> Result<(Channel<StagedEndpoint>, Channel<StagedEndpoint>), LocalPairError> {
    joined(config, |endpoint| StagedEndpoint::new(endpoint, disorder))
}

fn joined<E: Transport<RemoteKey = SlotKey>>(
    config: SlotConfig,
    wrap: impl Fn(MappedEndpoint) -> E,
) -> Result<(Channel<E>, Channel<E>), LocalPairError> {
    let layout = SlotLayout::new(config)?;
    let slots = [Region::anonymous(layout.slot_bytes())?, Region::anonymous(layout.slot_bytes())?];
    let events = [Arc::new(event_fd()?), Arc::new(event_fd()?)];
    let end = |me: usize, peer: usize| {
        let endpoint = MappedEndpoint::new(
            TransportKind::Local,
            slots[peer].clone(),
            Arc::clone(&events[peer]),
            Arc::clone(&events[me]),
        );
        Channel::new(wrap(endpoint), layout, slots[me].clone(), SlotKey)
    };
    Ok((end(0, 1)?, end(1, 0)?))
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::wait::{SpinPolicy, WaitSet, wait_until};

    #[test]
    fn frames_cross_in_order_between_threads_that_sleep() {
        let config = SlotConfig { slot_bytes: 64 << 10, num_frames: 2 };
        let (mut a, mut b) = pair(config).unwrap();
        let rounds = 500u64;
        let deadline = Instant::now() + Duration::from_secs(20);
        let policy = SpinPolicy { spin: Duration::ZERO };
        let echo = std::thread::spawn(move || {
            let set = WaitSet::new().unwrap();
            set.add(b.wait_fd().unwrap()).unwrap();
            for round in 0..rounds {
                wait_until(
                    &set,
                    policy,
                    deadline,
                    || b.has_frame().then_some(()),
                    |on| {
                        if on { b.arm() } else { b.disarm() }
                    },
                )
                .unwrap()
                .expect("frame before the deadline");
                let frame = b.try_next().unwrap().unwrap();
                let mut bytes = [0u8; 8];
                b.view(&frame).copy_to(0, &mut bytes).unwrap();
                assert_eq!(u64::from_ne_bytes(bytes), round);
                b.release().unwrap();
            }
        });
        let set = WaitSet::new().unwrap();
        set.add(a.wait_fd().unwrap()).unwrap();
        for round in 0..rounds {
            let frame = loop {
                if let Some(frame) = a.try_reserve().unwrap() {
                    break frame;
                }
                wait_until(
                    &set,
                    policy,
                    deadline,
                    || a.has_news().then_some(()),
                    |on| {
                        if on { a.arm() } else { a.disarm() }
                    },
                )
                .unwrap()
                .expect("credit before the deadline");
            };
            a.write_view(&frame).put_bytes(0, &round.to_ne_bytes()).unwrap();
            a.publish(frame, 8).unwrap();
        }
        echo.join().unwrap();
    }
}
