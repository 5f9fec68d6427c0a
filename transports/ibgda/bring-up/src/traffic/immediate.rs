//! The stage `immediate`: puts with immediate data, taken by the host and by the device functions in turn, and the
//! failure of a put that finds no receive.

use std::time::Duration;

use anyhow::{Context, Error, Result, anyhow, bail, ensure};
use ibgda::{Immediate, ReceiveError};

use super::Session;
use crate::memory::{area, expect, pattern};
use crate::post::PostError;

/// Receives that each queue keeps posted.
pub(crate) const NUM_RECEIVES: u32 = 16;

impl Session {
    pub(super) fn immediate(&mut self) -> Result<String> {
        let num_queues = self.own.num_queues as usize;
        for round in 0..NUM_ROUNDS {
            self.put_round(round).with_context(|| format!("round {round}"))?;
        }
        let beyond = self.put_beyond_receives()?;
        self.rejoin()?;
        // Usable again in both directions.
        self.put_round(NUM_ROUNDS).context("after the reset")?;
        let num = (NUM_ROUNDS + 1) * NUM_RECEIVES * num_queues as u32;
        Ok(format!("{num} puts with immediate data, {NUM_RECEIVES} receives per queue; {beyond}"))
    }

    /// As many puts on each queue as it has receives, in both directions. A reader that takes the immediate data
    /// finds the bytes.
    fn put_round(&mut self, round: u32) -> Result<()> {
        let num_queues = self.own.num_queues as usize;
        for queue_idx in 0..num_queues {
            let ours = pattern(self.own.seed, salt(queue_idx, round), MOST_BYTES);
            self.peer()?.mirror().write(area(queue_idx), &ours)?;
        }
        self.meet()?;
        let (poster, peer) = (self.poster()?, self.peer()?);
        for number in 0..NUM_RECEIVES {
            for queue_idx in 0..num_queues {
                let imm = value(self.own.seed, queue_idx, round, number);
                poster.put_imm(queue_idx, area(queue_idx) + place(number), length(number), imm)?;
            }
        }
        let mut num_taken = vec![0_u32; num_queues];
        for nth in 0..NUM_RECEIVES * num_queues as u32 {
            // The host's own functions, then the ones that kernels have.
            let taken = if round.is_multiple_of(2) {
                peer.receive(self.timeout).map_err(Error::from).and_then(|taken| {
                    let seconds = self.timeout.as_secs_f64();
                    taken.ok_or_else(|| {
                        anyhow!("no immediate data of the peer's came within {seconds} s")
                    })
                })
            } else {
                poster.receive_imm((nth / NUM_RECEIVES) as usize).map_err(Error::from)
            };
            let taken = match taken {
                // A queue pair that failed by a request gives its receives back: that is the cause.
                Err(error) if !is_time_out(&error) => {
                    (0..num_queues).try_for_each(|queue_idx| poster.quiet(queue_idx))?;
                    return Err(error);
                }
                other => other?,
            };
            let queue_idx = (0..num_queues)
                .find(|idx| poster.qpn(*idx) == taken.qpn)
                .ok_or_else(|| anyhow!("{taken:?} is of no queue of this side"))?;
            let number = num_taken[queue_idx];
            num_taken[queue_idx] += 1;
            let expected = Immediate {
                qpn: taken.qpn,
                imm: value(self.theirs.seed, queue_idx, round, number),
                num_bytes: length(number) as u32,
            };
            ensure!(taken == expected, "{taken:?} came, the peer sent {expected:?}");
            // Check immediately: immediate data that overtakes its bytes shows here.
            let theirs = pattern(self.theirs.seed, salt(queue_idx, round), MOST_BYTES);
            let what =
                format!("queue {queue_idx}, put {number}: behind its immediate data, the bytes");
            let (begin, bytes) = (place(number), length(number));
            expect(peer.slot(), area(queue_idx) + begin, &theirs[begin..begin + bytes], &what)?;
        }
        // First: after a failed request, the receives of its queue pair return flushed; the request is the cause.
        for queue_idx in 0..num_queues {
            poster.quiet(queue_idx)?;
        }
        ensure!(peer.receive(Duration::ZERO)?.is_none(), "more came than the peer sent");
        self.meet()
    }

    /// One put more than there are receives, and none is taken meanwhile. The connector uses the first queue. The
    /// listener uses the last one, if that is another.
    fn put_beyond_receives(&mut self) -> Result<String> {
        let num_queues = self.own.num_queues as usize;
        let is_ours = self.own.is_connector || num_queues > 1;
        let is_theirs = !self.own.is_connector || num_queues > 1;
        let (first, last) = (0, num_queues - 1);
        let (queue_idx, their_queue) =
            if self.own.is_connector { (first, last) } else { (last, first) };
        self.meet()?;
        let mut detail = "this side's only queue is the peer's to fail on".to_owned();
        if is_ours {
            let poster = self.poster()?;
            let posted = (0..=NUM_RECEIVES)
                .try_for_each(|number| poster.put_imm(queue_idx, area(queue_idx), 0, number));
            match posted.and_then(|()| poster.quiet(queue_idx)) {
                Err(PostError::Completion { cause, .. }) if cause.syndrome() == NO_RECEIVE => {
                    let qpn = poster.qpn(queue_idx);
                    detail = format!("one more than those: queue pair {qpn:#x}: {cause}");
                }
                Err(error) => {
                    bail!("a put without a receive: expected syndrome {NO_RECEIVE:#04x}: {error}")
                }
                Ok(()) => bail!("{NUM_RECEIVES} receives took {} puts", NUM_RECEIVES + 1),
            }
        }
        self.meet()?;
        if is_theirs {
            // Puts that found a receive have arrived.
            let queue = &self.peer()?.queues()[their_queue];
            for number in 0..NUM_RECEIVES {
                let taken = queue.receive(self.timeout)?;
                let expected = Immediate { qpn: queue.qpn(), imm: number, num_bytes: 0 };
                ensure!(
                    taken == Some(expected),
                    "put {number} of the peer before it failed: {taken:?} came"
                );
            }
        }
        self.meet()?;
        Ok(detail)
    }
}

/// Whether nothing came, in contrast to something that fails.
fn is_time_out(error: &Error) -> bool {
    let posted = error.downcast_ref::<PostError>();
    match posted {
        Some(error) => matches!(error, PostError::TimedOut { .. }),
        None => !error.is::<ReceiveError>(),
    }
}

/// Seed of the bytes of a round.
fn salt(queue_idx: usize, round: u32) -> u64 {
    5000 + queue_idx as u64 * 100 + u64::from(round)
}

/// Offset of the `number`th put of a round in its queue's area. Each put has bytes of its own.
const fn place(number: u32) -> usize {
    number as usize * (MOST_BYTES / NUM_RECEIVES as usize)
}

/// Length of the `number`th put of a round.
const fn length(number: u32) -> usize {
    LENGTHS[number as usize % LENGTHS.len()]
}

/// Its immediate data.
fn value(seed: u64, queue_idx: usize, round: u32, number: u32) -> u32 {
    (seed as u32) ^ ((queue_idx as u32) << 24 | round << 16 | number)
}

/// Every other one is taken by the device functions. The ring of completions has 16 or 32 entries.
const NUM_ROUNDS: u32 = 8;
const LENGTHS: [usize; 4] = [8, 0, 256, 64];
/// Bytes of all puts of a queue in a round.
const MOST_BYTES: usize = 4096;
/// Syndrome of a request that found no receive.
const NO_RECEIVE: u8 = 0x16;
