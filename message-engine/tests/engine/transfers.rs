//! Transfers without faults.

use std::time::{Duration, Instant};

use rand::RngExt;
use switchyard_message_engine::engine::{
    Access, Descriptor, EngineConfig, OpError, SubmitError, TransferError, TransferStatus,
};

use crate::common::{
    TestTransport, config, contents, memory_of, pair, pair_of, poisoned, random_bytes, rng, soon,
    until,
};

/// Lengths around every limit: empty, short, at the edge of eager, one and several parts, odd ends.
const SIZES: [usize; 12] =
    [0, 1, 7, 4096, 8191, 8192, 8193, 65_537, 1 << 20, (1 << 20) + 1, 5_000_001, 9 << 20];

#[test]
fn messages_of_every_size_go_both_ways_on_one_connection() {
    for by in TestTransport::all() {
        let (pair, mut rng) = (pair(by), rng());
        for len in SIZES {
            for (from, to, sender, receiver) in [
                (&pair.out, &pair.back, &pair.here, &pair.there),
                (&pair.back, &pair.out, &pair.there, &pair.here),
            ] {
                let bytes = random_bytes(&mut rng, len);
                let source = memory_of(sender, &bytes);
                let target = poisoned(receiver, len + 10);
                let got = to.start_recv(&target.span(0, len as u64 + 10).unwrap(), soon()).unwrap();
                let sent = from.send(&source.span(0, len as u64).unwrap(), soon()).unwrap();
                assert_eq!((sent, got.wait().unwrap()), (len as u64, len as u64), "{by:?}");
                assert!(contents(&target, 0, len) == bytes, "{by:?}: {len} bytes differ");
                assert_eq!(contents(&target, len as u64, 10), [0xa5; 10], "{by:?}: beyond the end");
            }
        }
    }
}

#[test]
fn messages_before_their_receives_are_matched_in_order() {
    for by in TestTransport::all() {
        let (pair, mut rng) = (pair(by), rng());
        let messages: Vec<_> = (0..40)
            .map(|_| {
                let len = if rng.random_bool(0.5) { 100 } else { 100_000 };
                random_bytes(&mut rng, len)
            })
            .collect();
        let sources: Vec<_> = messages.iter().map(|bytes| memory_of(&pair.here, bytes)).collect();
        let sends: Vec<_> = sources
            .iter()
            .zip(&messages)
            .map(|(source, bytes)| {
                pair.out.start_send(&source.span(0, bytes.len() as u64).unwrap(), soon()).unwrap()
            })
            .collect();
        for bytes in &messages {
            let target = poisoned(&pair.there, 100_000);
            let got = pair.back.recv(&target.span(0, 100_000).unwrap(), soon()).unwrap();
            assert_eq!(got, bytes.len() as u64);
            assert!(contents(&target, 0, bytes.len()) == *bytes, "{by:?}: out of order");
        }
        for send in sends {
            send.wait().unwrap();
        }
    }
}

#[test]
fn vectors_are_one_transfer_of_many_messages() {
    for by in TestTransport::all() {
        let (pair, mut rng) = (pair(by), rng());
        let lens: Vec<usize> = (0..64).map(|_| rng.random_range(0..20_000)).collect();
        let all = random_bytes(&mut rng, lens.iter().sum());
        let (source, target) = (memory_of(&pair.here, &all), poisoned(&pair.there, all.len()));
        let mut at = 0;
        let spans: Vec<_> = lens
            .iter()
            .map(|len| {
                at += *len as u64;
                let range = (at - *len as u64, *len as u64);
                (source.span(range.0, range.1).unwrap(), target.span(range.0, range.1).unwrap())
            })
            .collect();
        let (from, to): (Vec<_>, Vec<_>) = spans.into_iter().unzip();
        let got = pair.back.start_recvv(&to, soon()).unwrap();
        assert_eq!(pair.out.sendv(&from, soon()).unwrap(), all.len() as u64);
        assert_eq!(got.wait().unwrap(), all.len() as u64);
        assert!(contents(&target, 0, all.len()) == all, "{by:?}");
        assert_eq!(pair.out.sendv(&[], soon()).unwrap(), 0);
    }
}

#[test]
fn one_sided_transfers_move_what_was_advertised() {
    for by in TestTransport::all() {
        let (pair, mut rng) = (pair(by), rng());
        for len in SIZES {
            let bytes = random_bytes(&mut rng, len);
            let source = memory_of(&pair.here, &bytes);
            let target = poisoned(&pair.there, len + 20);
            // The descriptor travels as bytes.
            let descriptor = pair.back.advertise(&target.span(10, len as u64).unwrap()).unwrap();
            let remote = Descriptor::from_bytes(&descriptor.to_bytes()).unwrap();
            let span = source.span(0, len as u64).unwrap();
            assert_eq!(pair.out.write(&span, &remote, soon()).unwrap(), len as u64);
            // The bytes are visible as soon as the writer's transfer is done.
            assert!(contents(&target, 10, len) == bytes, "{by:?}: {len} bytes written");
            assert_eq!(contents(&target, 0, 10), [0xa5; 10]);
            assert_eq!(contents(&target, 10 + len as u64, 10), [0xa5; 10]);
            let back = poisoned(&pair.here, len);
            let span = back.span(0, len as u64).unwrap();
            assert_eq!(pair.out.read(&span, &remote, soon()).unwrap(), len as u64);
            assert!(contents(&back, 0, len) == bytes, "{by:?}: {len} bytes read");
        }
    }
}

#[test]
fn vectored_writes_and_reads_scatter_and_gather() {
    for by in TestTransport::all() {
        let (pair, mut rng) = (pair(by), rng());
        let (num, each) = (128u64, 3000u64);
        let bytes = random_bytes(&mut rng, (num * each) as usize);
        let source = memory_of(&pair.here, &bytes);
        let target = poisoned(&pair.there, bytes.len());
        let local: Vec<_> = (0..num).map(|i| source.span(i * each, each).unwrap()).collect();
        // Reversed, so that order matters.
        let there: Vec<_> = (0..num).rev().map(|i| target.span(i * each, each).unwrap()).collect();
        let remote = pair.back.advertisev(&there).unwrap();
        assert_eq!(pair.out.writev(&local, &remote, soon()).unwrap(), num * each);
        for i in 0..num {
            let found = contents(&target, (num - 1 - i) * each, each as usize);
            assert!(found == bytes[(i * each) as usize..][..each as usize], "{by:?}: part {i}");
        }
        let back = poisoned(&pair.here, bytes.len());
        let local: Vec<_> = (0..num).map(|i| back.span(i * each, each).unwrap()).collect();
        assert_eq!(pair.out.readv(&local, &remote, soon()).unwrap(), num * each);
        assert!(contents(&back, 0, bytes.len()) == bytes, "{by:?}");
    }
}

#[test]
fn notifications_of_any_length_arrive_whole_and_in_order() {
    for by in TestTransport::all() {
        // The window is far smaller than the sum of the notifications, so that most of them wait at the sender.
        let small = EngineConfig { notify_window_bytes: 4096, ..config(by) };
        let (pair, mut rng) = (pair_of(config(by), small), rng());
        let lens = [0, 1, 255, 256, 257, 4000, 4096, 65_536, 65_537, 1 << 20, 3_000_001, 5, 0];
        let all: Vec<_> = lens.iter().map(|len| random_bytes(&mut rng, *len)).collect();
        let sends: Vec<_> =
            all.iter().map(|bytes| pair.out.start_notify(bytes, soon()).unwrap()).collect();
        for (idx, bytes) in all.iter().enumerate() {
            let got = pair.there.next_notification(soon()).unwrap();
            assert!(got.bytes == *bytes, "{by:?}: notification {idx} of {} bytes", bytes.len());
            assert_eq!(got.engine_id, pair.here.endpoint().engine_id);
        }
        for send in sends {
            send.wait().unwrap();
        }
        assert!(pair.there.take_notifications().is_empty());
    }
}

#[test]
fn a_sender_of_notifications_waits_until_they_are_taken() {
    for by in TestTransport::all() {
        let small = EngineConfig { notify_window_bytes: 4096, ..config(by) };
        let pair = pair_of(config(by), small);
        let first = pair.out.start_notify(&[1; 4000], soon()).unwrap();
        first.wait().unwrap();
        let late = Instant::now() + Duration::from_millis(50);
        let error = pair.out.notify(&[2; 4000], late).unwrap_err().to_string();
        assert!(error.contains("deadline"), "{error}");
        // The expired notification is never sent, and the following ones are.
        let third = pair.out.start_notify(&[3; 4000], soon()).unwrap();
        assert_eq!(pair.there.next_notification(soon()).unwrap().bytes, [1; 4000]);
        assert_eq!(pair.there.next_notification(soon()).unwrap().bytes, [3; 4000]);
        third.wait().unwrap();
        let limited = EngineConfig { max_notification_bytes: 10, ..config(by) };
        let pair = pair_of(config(by), limited);
        let refused = pair.out.start_notify(&[0; 11], soon()).unwrap_err();
        assert_eq!(refused, SubmitError::TooLong { bytes: 11, limit: 10 });
    }
}

#[test]
fn a_buffer_too_small_fails_and_stays_untouched() {
    for by in TestTransport::all() {
        let pair = pair(by);
        let target = poisoned(&pair.there, 50_000);
        for len in [100usize, 100_000] {
            let source = memory_of(&pair.here, &vec![1; len]);
            let got = pair.back.start_recv(&target.span(0, 99).unwrap(), soon()).unwrap();
            let sent = pair.out.send(&source.span(0, len as u64).unwrap(), soon());
            let error = got.wait().unwrap_err();
            let (op, bytes) = ("recv", len as u64);
            assert_eq!(error, TransferError::Truncated { op, bytes, capacity: 99 });
            // A short message was sent ahead. A long one is refused at both ends.
            assert_eq!(sent.is_ok(), len == 100, "{by:?}: {sent:?}");
            assert_eq!(contents(&target, 0, 200), [0xa5; 200]);
        }
        // The connection stays usable.
        let source = memory_of(&pair.here, &[3; 60_000]);
        let got = pair.back.start_recv(&target.span(0, 50_000).unwrap(), soon()).unwrap();
        pair.out.send(&source.span(0, 50_000).unwrap(), soon()).unwrap();
        assert_eq!(got.wait().unwrap(), 50_000);
    }
}

/// The sender's error does not call the message too long if the receiver cannot open a buffer that is long enough.
#[test]
fn a_buffer_that_cannot_be_opened_is_called_so_at_both_ends() {
    for by in TestTransport::all() {
        let pair = pair(by);
        let source = memory_of(&pair.here, &[1; 100_000]);
        let closed = pair.there.alloc(100_000, Access::Local).unwrap();
        let got = pair.back.start_recv(&closed.whole(), soon()).unwrap();
        let sent = pair.out.send(&source.span(0, 100_000).unwrap(), soon()).unwrap_err();
        let (op, bytes) = ("send", 100_000);
        assert_eq!(sent, OpError::Transfer(TransferError::NotOpened { op, bytes }), "{by:?}");
        assert!(sent.to_string().contains("register the buffer"), "{sent}");
        let error = got.wait().unwrap_err().to_string();
        assert!(error.contains("not registered for writing by peers"), "{by:?}: {error}");
        assert_eq!(contents(&closed, 0, 100_000), [0; 100_000]);
        // The connection stays usable.
        let target = poisoned(&pair.there, 100_000);
        let got = pair.back.start_recv(&target.whole(), soon()).unwrap();
        pair.out.send(&source.span(0, 100_000).unwrap(), soon()).unwrap();
        assert_eq!(got.wait(), Ok(100_000));
    }
}

#[test]
fn numbers_of_transfers_tell_done_pending_and_failed_apart() {
    for by in TestTransport::all() {
        let pair = pair(by);
        let (source, target) = (memory_of(&pair.here, &[7; 100]), poisoned(&pair.there, 100));
        let whole =
            |memory: &switchyard_message_engine::engine::MemoryRegion| memory.span(0, 100).unwrap();
        let id = pair.back.start_recv(&whole(&target), soon()).unwrap().into_id();
        assert_eq!(pair.there.poll_async(id), Ok(TransferStatus::Pending));
        pair.out.send(&whole(&source), soon()).unwrap();
        let mut last = TransferStatus::Pending;
        until("the message", || {
            last = pair.there.poll_async(id).unwrap();
            last != TransferStatus::Pending
        });
        assert_eq!(last, TransferStatus::Done { bytes: 100 });
        assert!(pair.there.poll_async(id).is_err(), "its outcome was taken");
        let soon_over = Instant::now() + Duration::from_millis(20);
        let id = pair.back.start_recv(&whole(&target), soon_over).unwrap().into_id();
        until("the deadline", || pair.there.poll_async(id) != Ok(TransferStatus::Pending));
        let failed = TransferStatus::Failed(TransferError::Deadline { op: "recv" });
        for _ in 0..3 {
            assert_eq!(pair.there.poll_async(id), Ok(failed.clone()), "it stays known");
        }
        assert_eq!(pair.there.take(id), Ok(failed));
        assert!(pair.there.poll_async(id).is_err());
        assert_eq!(pair.there.stats().num_transfers, 0);
    }
}

#[tokio::test]
async fn tasks_can_do_the_same() {
    for by in TestTransport::all() {
        let here = switchyard_message_engine::engine::Engine::start(config(by)).unwrap();
        let there = switchyard_message_engine::engine::Engine::start(config(by)).unwrap();
        let addr = there.endpoint().addr;
        let (out, back) =
            tokio::join!(here.connect_async(addr, soon()), there.accept_async(soon()));
        let (out, back) = (out.unwrap(), back.unwrap());
        let bytes = random_bytes(&mut rng(), 200_000);
        let (source, target) = (memory_of(&here, &bytes), poisoned(&there, bytes.len()));
        let (from, to) = (source.span(0, 200_000).unwrap(), target.span(0, 200_000).unwrap());
        let (sent, got) = tokio::join!(out.send_async(&from, soon()), back.recv_async(&to, soon()));
        assert_eq!((sent.unwrap(), got.unwrap()), (200_000, 200_000));
        assert!(contents(&target, 0, bytes.len()) == bytes, "{by:?}");
        let remote = back.advertise(&to).unwrap();
        out.write_async(&from, &remote, soon()).await.unwrap();
        out.read_async(&from, &remote, soon()).await.unwrap();
        back.notify_async(b"done", soon()).await.unwrap();
        assert_eq!(here.next_notification_async(soon()).await.unwrap().bytes, b"done");
        let late = Instant::now() + Duration::from_millis(10);
        assert!(there.accept_async(late).await.is_err());
    }
}

#[test]
fn endpoints_come_and_go_by_their_metadata() {
    for by in TestTransport::all() {
        let named = EngineConfig {
            gpu_index: Some(3),
            pci_bdf: Some("0000:3b:00.0".to_owned()),
            ..config(by)
        };
        let here = switchyard_message_engine::engine::Engine::start(config(by)).unwrap();
        let there = switchyard_message_engine::engine::Engine::start(named).unwrap();
        let metadata = there.metadata();
        let first = here.add_remote_endpoint(&metadata, soon()).unwrap();
        assert_eq!(first.peer().gpu_index, Some(3));
        assert_eq!(first.peer().pci_bdf.as_deref(), Some("0000:3b:00.0"));
        assert_eq!(first.peer().addr, there.endpoint().addr);
        let again = here.add_remote_endpoint(&metadata, soon()).unwrap();
        assert_eq!(first.id(), again.id(), "one connection is enough");
        // The other end need not accept the connection. It can use the connection by the peer's metadata, once it is
        // established.
        until("the other end", || there.stats().num_connections == 1);
        let back = there.add_remote_endpoint(&here.metadata(), soon()).unwrap();
        back.notify(b"hello", soon()).unwrap();
        assert_eq!(here.next_notification(soon()).unwrap().connection, first.id());
        assert_eq!(here.remove_remote_endpoint(&metadata), Ok(true));
        until("both ends to close", || first.closed().is_some() && back.closed().is_some());
        assert_eq!(here.remove_remote_endpoint(&metadata), Ok(false));
        let third = here.add_remote_endpoint(&metadata, soon()).unwrap();
        assert_ne!(third.id(), first.id());
        assert!(here.add_remote_endpoint(b"nonsense", soon()).is_err());
    }
}

#[test]
fn registrations_are_shared_by_range_and_revoked_with_the_last() {
    for by in TestTransport::robust() {
        let pair = pair(by);
        let mut backing = vec![0u8; 10_000];
        let ptr = std::ptr::NonNull::new(backing.as_mut_ptr()).unwrap();
        let access = Access::RemoteReadWrite;
        // SAFETY: `backing` outlives the engines' use of it: every region is deregistered below.
        let (first, second, within, other) = unsafe {
            (
                pair.there.reg(ptr, 10_000, access).unwrap(),
                pair.there.reg(ptr, 10_000, access).unwrap(),
                pair.there.reg(ptr.add(100), 50, access).unwrap(),
                pair.there.reg(ptr, 10_000, Access::RemoteRead).unwrap(),
            )
        };
        assert_eq!(first.registration(), second.registration());
        assert_eq!(first.registration(), within.registration());
        assert_ne!(first.registration(), other.registration(), "other rights, other keys");
        let there = pair.back.advertise(&within.whole()).unwrap();
        let source = memory_of(&pair.here, &[9; 50]);
        let span = source.span(0, 50).unwrap();
        pair.out.write(&span, &there, soon()).unwrap();
        let mut found = [0; 52];
        first.copy_out(99, &mut found).unwrap();
        assert_eq!((found[0], found[1], found[50], found[51]), (0, 9, 9, 0));
        // A write into read-only memory fails.
        let readable = pair.back.advertise(&other.span(0, 50).unwrap()).unwrap();
        pair.out.read(&span, &readable, soon()).unwrap();
        let error = pair.out.write(&span, &readable, soon()).unwrap_err().to_string();
        let (denied, revoked) = if by.ends_with_a_refusal() {
            ("denies access", "denies access")
        } else {
            ("does not allow", "revoked")
        };
        assert!(error.contains(denied), "{by:?}: {error}");
        let again = by.ends_with_a_refusal().then(|| {
            let out = pair.here.connect(pair.there.endpoint().addr, soon()).unwrap();
            (out, pair.there.accept(soon()).unwrap())
        });
        let out = again.as_ref().map_or(&pair.out, |(out, _)| out);

        assert!(!pair.there.dereg(second).unwrap(), "the first keeps the keys");
        let kept = pair.there.dereg(first).unwrap_err();
        assert!(kept.detail.contains("deregister them first"), "{}", kept.detail);
        let clone = within.clone();
        let used = pair.there.dereg(within).unwrap_err();
        assert!(used.detail.contains("use it"), "{}", used.detail);
        drop(used.region);
        assert!(!pair.there.dereg(clone).unwrap());
        assert!(pair.there.dereg(kept.region.unwrap()).unwrap(), "the last one revokes");
        assert!(pair.there.dereg(other).unwrap());
        let error = out.write(&span, &there, soon()).unwrap_err().to_string();
        assert!(error.contains(revoked), "{by:?}: {error}");
        assert_eq!(backing[150], 0);
    }
}
