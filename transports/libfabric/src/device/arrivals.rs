//! Handling of completions, messages and mail that arrive at a device.

use std::time::Duration;

use p2p_core::log_limit::LogLimit;

use super::super::fi_endpoint::PostStatus;
use super::super::inbound::Inbound;
use super::super::link::{Context, IDX_MASK, Link, note_of};
use super::super::mailbox::MailboxCursor;
use super::super::message::{Action, Header};
use super::super::port::{Failure, Port};
use super::super::sys;
use super::super::table::{State, note_stall};
use super::Device;

impl Device {
    /// Handles the completion in `state.entries[nth]`.
    pub(super) fn handle(&self, state: &mut State, nth: usize) {
        let entry = state.entries[nth];
        let source =
            if self.port.traits().knows_source { state.sources[nth] } else { sys::FI_ADDR_UNSPEC };
        if entry.flags & sys::FI_REMOTE_WRITE != 0 {
            if entry.flags & sys::FI_REMOTE_CQ_DATA != 0 {
                self.handle_write(state, entry.data);
            }
            return;
        }
        // SAFETY: the context belongs to an operation of this device and lives until its
        // completion.
        let Some(context) = (unsafe { entry.op_context.cast::<Context>().as_ref() }) else {
            return;
        };
        if context.is_receive {
            let buffer = context.owner;
            self.handle_message(state, buffer, entry.len, source);
            state.receives.give_back(buffer);
        } else {
            state.complete(context, None);
        }
    }

    /// Counts a peer's completed write. The note alone identifies the writer: providers report a
    /// source for messages, but some of them report a wrong one for writes.
    fn handle_write(&self, state: &mut State, note: u64) {
        let has_secret = self.port.traits().has_wide_notes;
        let Some(entry) = state.entry_of(note as u32) else {
            tracing::debug!(note, "a write into a closed slot");
            return;
        };
        let Some(link) = &entry.link else { return };
        if note != note_of(link.id, link.token, has_secret) {
            if let Some(num_suppressed) = STRANGER_LOG.allow() {
                tracing::warn!(
                    slot = link.id,
                    num_suppressed,
                    "a write notification from another peer"
                );
            }
            return;
        }
        entry.inbound.count_write();
        deliver_ready(&self.port, link, &mut entry.inbound);
    }

    /// Reads the mail that has arrived. Returns true if there was any.
    #[inline]
    pub(super) fn read_mailboxes(&self, state: &mut State) -> bool {
        // With many pairs, each turn reads only some of the mailboxes. An idle pair costs next to
        // nothing then, and its first mail waits some turns. No thread sleeps before all mailboxes
        // were checked.
        let mut had_some = false;
        for nth in 0..state.hot.len() {
            had_some |= self.read_mailbox(state, state.hot[nth].into());
        }
        let num_cursors = state.cursors.len();
        for _ in 0..num_cursors.min(MAX_COLD) {
            let idx = state.next_cursor % num_cursors;
            state.next_cursor = idx + 1;
            if self.read_mailbox(state, idx) {
                had_some = true;
                if num_cursors > MAX_COLD {
                    state.mark_hot(idx as u16);
                }
            }
        }
        had_some
    }

    /// Reads the mail of one pair. Returns true if there was any.
    #[inline]
    fn read_mailbox(&self, state: &mut State, idx: usize) -> bool {
        let mut had_some = false;
        while let Some(cursor) = state.cursors[idx]
            && cursor.has_started()
            && self.handle_next_mail(state, idx, cursor)
        {
            had_some = true;
        }
        had_some
    }

    /// Handles one mail. Returns false if it must wait, or if it ended the pair.
    fn handle_next_mail(&self, state: &mut State, idx: usize, cursor: MailboxCursor) -> bool {
        let Some(mail) = cursor.read() else { return false };
        let State { cursors, table, stalls, .. } = state;
        let entry = &mut table[idx];
        let Some(link) = entry.link.clone() else { return false };
        let mut end = |detail: String| {
            link.fail("receive", 0, detail);
            cursors[idx] = None;
            false
        };
        if link.is_failed() {
            return end("a mail after the end of the pair".to_owned());
        }
        let message = mail.message();
        let header = match Header::decode(message) {
            Ok(header) => header,
            Err(error) => return end(format!("a bad mail: {error}")),
        };
        if header.slot != link.id || header.token != link.token || header.action.is_unnumbered() {
            return end("a mail that does not belong to this pair".to_owned());
        }
        link.note_mails_taken(header.mails);
        let expected = entry.inbound.next_seq();
        if header.seq.wrapping_sub(expected).cast_signed() > 0 {
            note_stall(stalls, link.id, expected);
            return false;
        }
        let admitted = entry.inbound.admit(&header, message);
        let cursor = cursor.next();
        match admitted {
            Ok(is_now) => {
                cursors[idx] = Some(cursor);
                link.set_mails_read(cursor.num_read());
                (!is_now || deliver(&self.port, &link, &header, message))
                    && deliver_ready(&self.port, &link, &mut entry.inbound)
            }
            Err(error) => end(error.to_string()),
        }
    }

    /// Handles one message.
    fn handle_message(&self, state: &mut State, buffer: u32, len: usize, source: sys::FiAddr) {
        let State { receives, table, stalls, .. } = state;
        let message = receives.message(buffer, len);
        let header = match Header::decode(message) {
            Ok(header) => header,
            Err(error) => {
                if let Some(num_suppressed) = STRANGER_LOG.allow() {
                    tracing::warn!(%error, num_suppressed, "an invalid message from an unknown sender");
                }
                return;
            }
        };
        let Some((entry, link)) = table
            .get_mut((header.slot & IDX_MASK) as usize)
            .and_then(|entry| entry.link.clone().map(|link| (entry, link)))
            .filter(|(_, link)| link.id == header.slot)
        else {
            tracing::debug!(slot = header.slot, "a message to a closed slot");
            return;
        };
        if header.token != link.token || !comes_from(&link, source) {
            // The sender is not the peer, so the pair stays usable.
            if let Some(num_suppressed) = STRANGER_LOG.allow() {
                tracing::warn!(
                    slot = link.id,
                    num_suppressed,
                    "a message without the right to this slot"
                );
            }
            return;
        }
        if header.action == Action::Farewell {
            entry.farewell = Some(header.writes);
            link.mark_peer_closed();
            return;
        }
        if entry.close_state.is_some() || link.is_failed() {
            return;
        }
        link.note_mails_taken(header.mails);
        match entry.inbound.admit(&header, message) {
            Ok(true) => {
                if deliver(&self.port, &link, &header, message) {
                    deliver_ready(&self.port, &link, &mut entry.inbound);
                }
            }
            Ok(false) if entry.inbound.has_gap() => {
                note_stall(stalls, link.id, entry.inbound.next_seq());
            }
            Ok(false) => {}
            Err(error) => link.fail("receive", 0, error.to_string()),
        }
    }

    /// Fails pairs in which a message with an earlier number stays missing.
    pub(super) fn sweep_stalls(state: &mut State) {
        let State { stalls, table, .. } = state;
        stalls.retain(|stall| {
            let Some(entry) = table.get(usize::from(stall.idx)) else { return false };
            let Some(link) = entry.link.as_ref().filter(|link| link.id == stall.id) else {
                return false;
            };
            let is_there = entry.inbound.next_seq() == stall.seq && !link.is_failed();
            if is_there && stall.since.elapsed() >= STALL_TIMEOUT {
                let seq = stall.seq;
                link.fail("receive", 0, format!("message {seq} did not arrive: it was lost"));
                return false;
            }
            is_there
        });
    }

    pub(super) fn handle_failure(&self, state: &mut State, failure: &Failure) {
        // SAFETY: the context belongs to an operation of this device and lives until its
        // completion.
        match unsafe { failure.context.cast::<Context>().as_ref() } {
            Some(context) if context.is_receive => {
                tracing::warn!(text = failure.text, "a message could not be received");
                state.receives.give_back(context.owner);
            }
            Some(context) => state.complete(context, Some(failure)),
            None => {
                // Small messages have no context. A gap in the sequence numbers shows the loss to
                // the peer.
                tracing::debug!(text = failure.text, flags = failure.flags, "a message was lost");
            }
        }
    }
}

/// True if `source` is the peer of `link`, or if the provider does not know the source.
fn comes_from(link: &Link, source: sys::FiAddr) -> bool {
    source == sys::FI_ADDR_UNSPEC || link.remote().is_none_or(|remote| remote.peer == source)
}

/// Delivers the buffered messages that are next in order. Returns false if one was invalid.
fn deliver_ready(port: &Port, link: &Link, inbound: &mut Inbound) -> bool {
    while let Some((header, message)) = inbound.next_ready() {
        if !deliver(port, link, &header, &message) {
            return false;
        }
    }
    true
}

/// Delivers a message, and replies if it asks for an answer. Returns false if it was invalid.
fn deliver(port: &Port, link: &Link, header: &Header, message: &[u8]) -> bool {
    match link.deliver(header, message) {
        Ok(None) => true,
        Ok(Some(id)) => {
            let Some(answer) = link.unnumbered(Action::Answered { id }, 0) else { return true };
            // Retry: the peer would wait for a lost answer until its deadline.
            for _ in 0..MAX_ANSWER_ATTEMPTS {
                match link.inject(port, &answer) {
                    Ok(PostStatus::Accepted) => break,
                    Ok(PostStatus::Again) => std::hint::spin_loop(),
                    Err(error) => {
                        let _ = link.fail_call(&error);
                        break;
                    }
                }
            }
            true
        }
        Err(error) => {
            link.fail("receive", 0, format!("a bad message: {error}"));
            false
        }
    }
}

/// Mailboxes that one turn reads in rotation, beside the recently used ones.
const MAX_COLD: usize = 64;
/// How much later than its successor a message may arrive.
const STALL_TIMEOUT: Duration = Duration::from_secs(1);
const MAX_ANSWER_ATTEMPTS: u32 = 1000;

/// Strangers on the fabric can cause these lines as often as they like.
static STRANGER_LOG: LogLimit = LogLimit::new();
