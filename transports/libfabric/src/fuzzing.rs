//! Entry points of fuzz targets into the decoders of peers' bytes.

use super::detail::Detail;
use super::inbound::Inbound;
use super::mailbox::{self, MailboxAddress};
use super::message::{Action, Credit, HEADER_BYTES, Header, push_part_head};

/// Messages of every kind, one of them with parts.
#[must_use]
pub fn message_samples() -> Vec<Vec<u8>> {
    let actions = [
        Action::Nothing,
        Action::Add { offset: 64, value: 1 },
        Action::Answer { id: 2 },
        Action::Answered { id: 3 },
        Action::Credit,
        Action::Farewell,
    ];
    let credit = Credit { offset: 128, total: 4 };
    let sample = |action, num_parts| {
        let header =
            Header { slot: 5, seq: 6, token: 7, writes: 8, action, credit, num_parts, mails: 9 };
        let mut head = [0; HEADER_BYTES];
        header.encode(&mut head);
        let mut message = head.to_vec();
        for part in 0..u32::from(num_parts) {
            push_part_head(&mut message, part * 256, 5);
            message.extend([part as u8; 8]);
        }
        message
    };
    actions.map(|action| sample(action, 0)).into_iter().chain([sample(actions[1], 3)]).collect()
}

/// Decodes bytes as a message. No part is placed unless all parts are valid, and none beyond the
/// slot.
pub fn check_message(bytes: &[u8]) {
    let Ok(header) = Header::decode(bytes) else { return };
    let mut head = [0; HEADER_BYTES];
    header.encode(&mut head);
    assert_eq!(Header::decode(&head), Ok(header));
    for slot_bytes in [8, SLOT_BYTES] {
        let mut num_placed = 0;
        let placed = header.for_each_part(bytes, slot_bytes, |offset, payload| {
            assert!(offset + payload.len() <= slot_bytes);
            num_placed += 1;
        });
        assert_eq!(num_placed, placed.map_or(0, |()| header.num_parts));
        let flag = match header.action {
            Action::Add { offset, .. } => Some(offset),
            _ => None,
        };
        let credit = (header.credit.total > 0).then_some(header.credit.offset);
        if placed.is_ok() {
            for offset in [flag, credit].into_iter().flatten() {
                assert!(offset as usize + 8 <= slot_bytes && offset.is_multiple_of(8));
            }
        }
    }
}

/// Decodes bytes as a cell of a mailbox, and its content as a message.
pub fn check_mail(bytes: &[u8]) {
    mailbox::check(bytes, check_message);
}

/// Decodes bytes as one peer's messages and writes, in any order. Messages must be delivered in the
/// order of their numbers, each once, and none before its writes have arrived.
pub fn check_order(bytes: &[u8]) {
    let Some((&max_missing, records)) = bytes.split_first() else { return };
    let limit = u32::from(max_missing % 40);
    // Writes name the message that they belong to, or there is a mailbox.
    let is_ordered = max_missing >= 128;
    let mut inbound = if is_ordered { Inbound::with_window(limit) } else { Inbound::new(limit) };
    let mut next = 0;
    for record in records.chunks_exact(4) {
        let near = |byte: u8| u32::from(byte).wrapping_sub(4);
        let seq = inbound.next_seq().wrapping_add(near(record[1]));
        match record[0] % 4 {
            0 if is_ordered => {
                if inbound.count_write_before(seq).is_err() {
                    return;
                }
            }
            0 => inbound.count_write(),
            // A mail that is ahead waits in its cell.
            1 if seq != inbound.next_seq() => {}
            _ => {
                let writes = inbound.num_writes().wrapping_add_signed(i64::from(record[2]) - 128);
                let header = Header {
                    slot: 0,
                    seq,
                    token: 0,
                    writes,
                    action: Action::Nothing,
                    credit: Credit::default(),
                    num_parts: 0,
                    mails: 0,
                };
                let message = vec![0; usize::from(record[3]) << 9];
                match inbound.admit(&header, &message) {
                    Ok(true) => placed(&header, &mut next, inbound.num_writes()),
                    Ok(false) => {}
                    // The pair ends.
                    Err(_) => return,
                }
            }
        }
        while let Some((header, _)) = inbound.next_ready() {
            placed(&header, &mut next, inbound.num_writes());
        }
    }
}

fn placed(header: &Header, next: &mut u32, num_writes: u64) {
    assert_eq!(header.seq, *next);
    assert!(header.writes <= num_writes);
    *next = next.wrapping_add(1);
}

/// Descriptions of a side, with and without a mailbox.
#[must_use]
pub fn detail_samples() -> Vec<Vec<u8>> {
    let mail = Some(MailboxAddress { address: 4096, key: 8 });
    let detail = Detail {
        slot: 1,
        max_message_bytes: 8192,
        counts_writes: true,
        token: 2,
        mail,
        address: vec![3; 16],
    };
    vec![detail.encode(), Detail { mail: None, ..detail }.encode()]
}

/// Decodes bytes as a peer's description of its side. Encoding and decoding the result must
/// reproduce it.
pub fn check_detail(bytes: &[u8]) {
    if let Ok(detail) = Detail::decode(bytes) {
        assert_eq!(Detail::decode(&detail.encode()), Ok(detail));
    }
}

const SLOT_BYTES: usize = 4096;
