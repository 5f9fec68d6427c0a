//! Tests of joined queues, in the order of the guide. Both sides do the same at the same time, each towards the
//! other, and check the arrived data.

mod fused;
mod immediate;

use std::time::Duration;

use anyhow::{Context, Error, Result, anyhow, bail, ensure};
use ibgda::Peer;
use softnic_driver::Driver;
use softnic_verbs::Syndrome;

pub(crate) use self::fused::Fused;
pub(crate) use self::immediate::NUM_RECEIVES;
use crate::args::Options;
use crate::exchange::{Channel, ExchangeError, Hello};
use crate::memory::{
    AREA_BYTES, COUNTER, COUNTER4, FIELDS, RING, RING_WORDS, SOURCE, SOURCE_BYTES, area, expect,
    expect_word, flag, pattern, wait_for,
};
use crate::post::{PostError, Poster};
use crate::report::whole_text;
use crate::stage::Stage;

/// Both sides, joined.
pub(crate) struct Session {
    driver: Driver,
    /// `None` once a reset has failed.
    peer: Option<Peer>,
    channel: Channel,
    own: Hello,
    theirs: Hello,
    fused: Option<Fused>,
    timeout: Duration,
    stall_at: Option<Stage>,
    fail_at: Option<Stage>,
    stage: Stage,
    step: u16,
}

impl Session {
    pub(crate) fn new(
        driver: Driver,
        peer: Peer,
        channel: Channel,
        [own, theirs]: [Hello; 2],
        fused: Option<Fused>,
        options: &Options,
    ) -> Self {
        let (peer, stage, step) = (Some(peer), Stage::Connect, 0);
        let Options { timeout, stall_at, fail_at, .. } = *options;
        Self { driver, peer, channel, own, theirs, fused, timeout, stall_at, fail_at, stage, step }
    }

    /// Runs a stage with the peer. The returned text describes the result.
    pub(crate) fn run(&mut self, stage: Stage) -> Result<String> {
        (self.stage, self.step) = (stage, 0);
        // The queues of `fused` come later.
        let has_queues = stage != Stage::Fused;
        if has_queues && self.stall_at == Some(stage) {
            softnic_verbs::stall(self.poster()?.qpn(0))?;
        }
        if has_queues && self.fail_at == Some(stage) {
            softnic_verbs::fail(self.poster()?.qpn(0), 0, Syndrome::RemoteOp)?;
        }
        let detail = match stage {
            Stage::Nop => self.nop(),
            Stage::Put => self.put(),
            Stage::Flag => self.flag(),
            Stage::Get => self.get(),
            Stage::Add => self.add(),
            Stage::Masked => self.masked(),
            Stage::Wrap => self.wrap(),
            Stage::Many => self.many(),
            Stage::Immediate => self.immediate(),
            Stage::Error => self.error(),
            Stage::Reset => self.reset(),
            Stage::Fused => self.run_fused(),
            Stage::Probe | Stage::Device | Stage::Domain | Stage::Queues | Stage::Connect => {
                bail!("`{stage}` comes before there is a peer")
            }
        }?;
        // No side continues while the other still checks its data.
        self.meet()?;
        let violations = softnic_verbs::violations();
        ensure!(violations.is_empty(), "the NIC in software objects: {}", violations.join("; "));
        Ok(detail)
    }

    /// Ends a failed stage: tells the peer, and finds out whether the peer failed first. A failed peer has
    /// destroyed its queues, which this side's NIC notices, too.
    pub(crate) fn give_up(&mut self, stage: Stage, error: Error) -> Error {
        let text = whole_text(&error);
        self.channel.give_up(stage, &text);
        if error.chain().any(|cause| cause.is::<ExchangeError>()) {
            return error;
        }
        match self.channel.reason() {
            Some(reason) => anyhow!("{reason}; on this side: {text}"),
            None => error,
        }
    }

    fn nop(&self) -> Result<String> {
        let poster = self.poster()?;
        for queue_idx in 0..poster.num_queues() {
            poster.nop(queue_idx)?;
            poster.quiet(queue_idx)?;
        }
        Ok(format!("a request without bytes completed on each of {} queues", poster.num_queues()))
    }

    fn put(&mut self) -> Result<String> {
        let ours = pattern(self.own.seed, 1, AREA_BYTES);
        self.clear(area(0), AREA_BYTES)?;
        self.meet()?;
        let (poster, peer) = (self.poster()?, self.peer()?);
        peer.mirror().write(area(0), &ours)?;
        poster.put(0, area(0), AREA_BYTES)?;
        poster.quiet(0)?;
        self.meet()?;
        let theirs = pattern(self.theirs.seed, 1, AREA_BYTES);
        expect(self.peer()?.slot(), area(0), &theirs, "the peer's put")?;
        Ok(format!("{AREA_BYTES} bytes arrived as they were sent"))
    }

    fn flag(&mut self) -> Result<String> {
        self.clear(flag(0), 8)?;
        for round in 1..=FLAG_ROUNDS {
            let len = FLAG_LENGTHS[round as usize % FLAG_LENGTHS.len()];
            self.clear(area(0), AREA_BYTES)?;
            self.meet()?;
            let (poster, peer) = (self.poster()?, self.peer()?);
            peer.mirror().write(area(0), &pattern(self.own.seed, 1000 + round, len))?;
            if round % 2 == 0 {
                poster.put_add(0, area(0), len, flag(0))?;
            } else {
                poster.put(0, area(0), len)?;
                poster.signal(0, flag(0), round)?;
            }
            wait_for(peer.slot(), flag(0), round, self.timeout)
                .with_context(|| format!("round {round}"))?;
            // Check immediately: a flag that overtakes its payload shows here.
            let theirs = pattern(self.theirs.seed, 1000 + round, len);
            let what = format!("round {round}: behind its flag, the peer's put of {len} bytes");
            expect(peer.slot(), area(0), &theirs, &what)?;
            poster.quiet(0)?;
            self.meet()?;
        }
        Ok(format!(
            "{FLAG_ROUNDS} times the bytes were there when their flag was, by add and by signal"
        ))
    }

    fn get(&mut self) -> Result<String> {
        let ours = pattern(self.own.seed, 2, SOURCE_BYTES);
        self.peer()?.slot().write(SOURCE, &ours)?;
        self.meet()?;
        let (poster, peer) = (self.poster()?, self.peer()?);
        peer.mirror().write(SOURCE, &vec![0; SOURCE_BYTES])?;
        poster.get(0, SOURCE, SOURCE_BYTES)?;
        poster.quiet_gets(0, SOURCE)?;
        let theirs = pattern(self.theirs.seed, 2, SOURCE_BYTES);
        expect(peer.mirror(), SOURCE, &theirs, "what was got")?;
        Ok(format!("{SOURCE_BYTES} bytes got, complete behind quiet_gets"))
    }

    fn add(&mut self) -> Result<String> {
        self.clear(COUNTER, 8)?;
        self.meet()?;
        let poster = self.poster()?;
        let value = addend(self.own.seed);
        for _ in 0..NUM_ADDS {
            poster.add8(0, COUNTER, value)?;
        }
        poster.quiet(0)?;
        self.meet()?;
        let expected = addend(self.theirs.seed).wrapping_mul(NUM_ADDS);
        expect_word(self.peer()?.slot(), COUNTER, expected, "the sum of the peer's adds")?;
        Ok(format!("{NUM_ADDS} adds of 8 bytes, the sum is {expected:#x}"))
    }

    fn masked(&mut self) -> Result<String> {
        // A counter of 4 bytes about to wrap, and its neighbour; two fields, the lower one about to wrap.
        let before = u64::from(NEIGHBOUR) << 32 | u64::from(u32::MAX);
        for offset in [COUNTER4, FIELDS] {
            self.peer()?.slot().write(offset, &before.to_le_bytes())?;
        }
        self.meet()?;
        let poster = self.poster()?;
        poster.add4(0, COUNTER4, 5)?;
        poster.add_fields(0, FIELDS, 7 << 32 | 3, 1 << 31)?;
        poster.quiet(0)?;
        self.meet()?;
        let slot = self.peer()?.slot();
        let neighbour = u64::from(NEIGHBOUR) << 32;
        expect_word(slot, COUNTER4, neighbour | 4, "the 4-byte counter and its neighbour")?;
        expect_word(slot, FIELDS, (neighbour + (7 << 32)) | 2, "the word of two fields")?;
        Ok("4-byte add and add to two fields: no carry went astray".to_owned())
    }

    fn wrap(&mut self) -> Result<String> {
        self.clear(RING, RING_WORDS as usize * 8)?;
        self.meet()?;
        let poster = self.poster()?;
        // Past the last wrap by a few.
        let num = u64::from(self.own.num_wraps) * INDICES + 100;
        let mut next = 0;
        while next < num {
            let place = next % RING_WORDS;
            let group = GROUP.min(num - next).min(RING_WORDS - place);
            poster
                .signal_words(0, RING + place as usize * 8, next + 1, group as u32)
                .with_context(|| format!("request {next} of {num}"))?;
            next += group;
        }
        poster.quiet(0).with_context(|| format!("after {num} requests"))?;
        let depth = poster.depth();
        // The peer may be slower by the whole of this stage.
        self.meet_within(self.timeout * WRAP_PATIENCE)?;
        let slot = self.peer()?.slot();
        for index in num.saturating_sub(RING_WORDS)..num {
            let offset = RING + (index % RING_WORDS) as usize * 8;
            expect_word(slot, offset, index + 1, &format!("the word of request {index}"))?;
        }
        Ok(format!("{num} requests at depth {depth}, {} wraps of the index", self.own.num_wraps))
    }

    fn many(&mut self) -> Result<String> {
        let num_queues = self.own.num_queues as usize;
        for queue_idx in 0..num_queues {
            self.clear(flag(queue_idx), 8)?;
            self.clear(area(queue_idx), AREA_BYTES)?;
            let ours = pattern(self.own.seed, 2000 + queue_idx as u64, AREA_BYTES);
            self.peer()?.mirror().write(area(queue_idx), &ours)?;
        }
        self.meet()?;
        let (poster, peer) = (self.poster()?, self.peer()?);
        // Two threads for each queue, which stand for two warps.
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..num_queues * 2)
                .map(|idx| {
                    scope.spawn({
                        let poster = &poster;
                        move || half_of_area(poster, idx / 2, idx % 2)
                    })
                })
                .collect();
            threads.into_iter().try_for_each(|thread| {
                thread.join().map_err(|_| anyhow!("a posting thread panicked"))??;
                Ok::<(), Error>(())
            })
        })?;
        for queue_idx in 0..num_queues {
            wait_for(peer.slot(), flag(queue_idx), NUM_PIECES as u64, self.timeout)
                .with_context(|| format!("queue {queue_idx}"))?;
            let theirs = pattern(self.theirs.seed, 2000 + queue_idx as u64, AREA_BYTES);
            let what = format!("queue {queue_idx}: the peer's puts");
            expect(peer.slot(), area(queue_idx), &theirs, &what)?;
        }
        Ok(format!(
            "{num_queues} queues at once, two threads each, {NUM_PIECES} puts and flags per queue"
        ))
    }

    /// The connector's request fails on the first queue, the listener's on the last one, if that is
    /// another: a failed request takes both ends out of service.
    fn error(&mut self) -> Result<String> {
        let num_queues = self.own.num_queues as usize;
        let queue_idx = if self.own.is_connector { 0 } else { num_queues - 1 };
        let is_ours = self.own.is_connector || num_queues > 1;
        let mut detail = "this side's only queue is the peer's to fail on".to_owned();
        if is_ours {
            let poster = self.poster()?;
            let posted = poster.put_with_wrong_key(queue_idx);
            match posted.and_then(|()| poster.quiet(queue_idx)) {
                Err(PostError::Completion { cause, .. }) if cause.syndrome() == REMOTE_ACCESS => {
                    detail =
                        format!("a wrong key: queue pair {:#x}: {cause}", poster.qpn(queue_idx));
                }
                Err(error) => {
                    bail!("a put with a wrong key: expected syndrome {REMOTE_ACCESS:#04x}: {error}")
                }
                Ok(()) => bail!(
                    "a put with a wrong key was completed without an error: any host that guesses its address can write the peer's memory"
                ),
            }
        }
        self.meet()?;
        Ok(detail)
    }

    /// Takes all queues to reset and joins them again.
    fn rejoin(&mut self) -> Result<()> {
        let gone = || anyhow!("the queues are gone after a failed reset");
        let reset = self.peer.take().ok_or_else(gone)?.reset()?;
        // A queue of the other side that is not in reset would take the next packet for an old one.
        self.meet()?;
        let patience = self.timeout * MEET_PATIENCE;
        let description = self.channel.describe(&reset.description(), patience)?;
        self.peer = Some(reset.rejoin(&description)?);
        Ok(())
    }

    fn reset(&mut self) -> Result<String> {
        self.rejoin()?;
        let num_queues = self.own.num_queues as usize;
        for queue_idx in 0..num_queues {
            self.clear(flag(queue_idx), 8)?;
            self.clear(area(queue_idx), AREA_BYTES)?;
        }
        self.meet()?;
        let (poster, peer) = (self.poster()?, self.peer()?);
        for queue_idx in 0..num_queues {
            let ours = pattern(self.own.seed, 3000 + queue_idx as u64, AREA_BYTES);
            peer.mirror().write(area(queue_idx), &ours)?;
            poster.put_add(queue_idx, area(queue_idx), AREA_BYTES, flag(queue_idx))?;
            poster.quiet(queue_idx)?;
        }
        for queue_idx in 0..num_queues {
            wait_for(peer.slot(), flag(queue_idx), 1, self.timeout)
                .with_context(|| format!("queue {queue_idx} after its reset"))?;
            let theirs = pattern(self.theirs.seed, 3000 + queue_idx as u64, AREA_BYTES);
            let what = format!("queue {queue_idx} after its reset: the peer's put");
            expect(peer.slot(), area(queue_idx), &theirs, &what)?;
        }
        Ok(format!("{num_queues} queues reset, joined again, and of use"))
    }

    fn peer(&self) -> Result<&Peer> {
        self.peer.as_ref().ok_or_else(|| anyhow!("the queues are gone after a failed reset"))
    }

    fn poster(&self) -> Result<Poster<'_>> {
        Ok(Poster::new(&self.driver, self.peer()?, self.timeout))
    }

    /// Zeroes a part of this side's slot, before the peer may write.
    fn clear(&self, offset: usize, len: usize) -> Result<()> {
        Ok(self.peer()?.slot().write(offset, &vec![0; len])?)
    }

    fn meet(&mut self) -> Result<()> {
        self.meet_within(self.timeout * MEET_PATIENCE)
    }

    fn meet_within(&mut self, patience: Duration) -> Result<()> {
        self.step += 1;
        Ok(self.channel.meet(self.stage, self.step, patience)?)
    }
}

/// Every other piece of a queue's area, each with an add to the queue's flag behind it.
fn half_of_area(poster: &Poster<'_>, queue_idx: usize, which: usize) -> Result<(), PostError> {
    let piece = AREA_BYTES / NUM_PIECES;
    for idx in (which..NUM_PIECES).step_by(2) {
        poster.put_add(queue_idx, area(queue_idx) + idx * piece, piece, flag(queue_idx))?;
    }
    poster.quiet(queue_idx)
}

/// Odd, and wider than 32 bits.
const fn addend(seed: u64) -> u64 {
    seed >> 8 | 1
}

/// Size of a request's index.
const INDICES: u64 = 65_536;
/// Lanes of a warp.
const GROUP: u64 = 32;
const FLAG_ROUNDS: u64 = 16;
const FLAG_LENGTHS: [usize; 4] = [64, 4096, 14_336, 8];
const NUM_ADDS: u64 = 100;
/// Above the counter of 4 bytes.
const NEIGHBOUR: u32 = 0x1234_5678;
/// Size of a queue's area.
const NUM_PIECES: usize = 16;
/// Syndrome of a foreign key.
const REMOTE_ACCESS: u8 = 0x13;
/// The peer may be in a wait of its own before it comes, and in another before it says that it failed.
const MEET_PATIENCE: u32 = 3;
const WRAP_PATIENCE: u32 = 12;
