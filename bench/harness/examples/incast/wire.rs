//! What the frames of this benchmark hold: a word that says what, two numbers, and payload.

use message_engine::credit::{Credit, Demand};
use p2p_core::{AnyEndpoint, Channel};

use crate::text;

/// One frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Head {
    /// Payload follows; the second number is its length.
    Data {
        round: u64,
        len: u64,
    },
    Demand(Demand),
    Credit(Credit),
    /// The message of the round has arrived.
    Done {
        round: u64,
    },
}

pub(crate) const HEAD_BYTES: usize = 24;

impl Head {
    fn words(self) -> [u64; 3] {
        match self {
            Self::Data { round, len } => [0, round, len],
            Self::Demand(demand) => [1, demand.announced, demand.withdrawn],
            Self::Credit(credit) => [2, credit.granted, credit.unscheduled],
            Self::Done { round } => [3, round, 0],
        }
    }

    fn of(words: [u64; 3]) -> Result<Self, String> {
        Ok(match words {
            [0, round, len] => Self::Data { round, len },
            [1, announced, withdrawn] => Self::Demand(Demand { announced, withdrawn }),
            [2, granted, unscheduled] => Self::Credit(Credit { granted, unscheduled }),
            [3, round, _] => Self::Done { round },
            other => return Err(format!("a frame begins with {other:?}")),
        })
    }
}

/// Sends one frame. False while the ring is full.
pub(crate) fn put(
    channel: &mut Channel<AnyEndpoint>,
    head: Head,
    payload: &[u8],
) -> Result<bool, String> {
    let Some(frame) = channel.try_reserve().map_err(text)? else { return Ok(false) };
    let mut view = channel.write_view(&frame);
    for (idx, word) in head.words().into_iter().enumerate() {
        view.put_bytes(8 * idx, &word.to_le_bytes()).map_err(text)?;
    }
    view.put_bytes(HEAD_BYTES, payload).map_err(text)?;
    channel.publish(frame, HEAD_BYTES + payload.len()).map_err(text)?;
    Ok(true)
}

/// Takes one frame, if there is one: its head, and of data the payload, into `payload`.
pub(crate) fn take(
    channel: &mut Channel<AnyEndpoint>,
    payload: &mut Vec<u8>,
) -> Result<Option<Head>, String> {
    let Some(frame) = channel.try_next().map_err(text)? else { return Ok(None) };
    let view = channel.view(&frame);
    let mut words = [0; 3];
    for (idx, word) in words.iter_mut().enumerate() {
        let mut bytes = [0; 8];
        view.copy_to(8 * idx, &mut bytes).map_err(text)?;
        *word = u64::from_le_bytes(bytes);
    }
    let head = Head::of(words)?;
    if let Head::Data { len, .. } = head {
        payload.resize(usize::try_from(len).map_err(text)?.min(channel.layout().frame_bytes()), 0);
        view.copy_to(HEAD_BYTES, payload).map_err(text)?;
    }
    channel.release().map_err(text)?;
    Ok(Some(head))
}
