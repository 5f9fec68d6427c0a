use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Instant;

use super::*;
use crate::bootstrap::wire::encode_goodbye;

const PATIENCE: Duration = Duration::from_secs(20);

/// One sentry with its own table, and one without.
fn sentries() -> [Arc<Sentry>; 2] {
    let leaves: [fn(RawFd) -> bool; 2] = [unshare_descriptors, |_| false];
    leaves.map(|leave| Arc::new(Sentry::start(leave).expect("a sentry")))
}

fn pair(sentry: &Arc<Sentry>) -> (SentrySocket, UnixStream) {
    let (ours, theirs) = UnixStream::pair().expect("sockets");
    ours.set_nonblocking(true).expect("a socket");
    theirs.set_read_timeout(Some(PATIENCE)).expect("a socket");
    (SentrySocket::of(Arc::clone(sentry), ours.into(), Goodbyes::plain()).expect("socket"), theirs)
}

fn until_over(socket: &SentrySocket) -> CloseReason {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(reason) = socket.reason() {
            return reason;
        }
        assert!(Instant::now() < deadline, "{socket:?}");
        thread::yield_now();
    }
}

fn count(event: BorrowedFd<'_>) -> u64 {
    let mut bytes = [0; 8];
    rustix::io::read(event, &mut bytes).map_or(0, |_| u64::from_ne_bytes(bytes))
}

#[test]
fn a_socket_is_in_the_sentrys_table_and_in_no_other() {
    let [private, shared] = sentries();
    assert!(private.is_private, "this system has no close_range(2) with CLOSE_RANGE_UNSHARE");
    assert!(!shared.is_private);
    for sentry in [private, shared] {
        let (ours, theirs) = UnixStream::pair().expect("sockets");
        let name = std::fs::read_link(format!("/proc/self/fd/{}", ours.as_raw_fd()));
        let name = name.expect("a socket's name");
        let copies = |folder: &str| {
            let entries = std::fs::read_dir(folder).expect("descriptors").flatten();
            // A descriptor that was closed meanwhile is another one.
            let is_it = |at: PathBuf| std::fs::read_link(at).is_ok_and(|found| found == name);
            entries.filter(|entry| is_it(entry.path())).count()
        };
        let own = format!("/proc/self/task/{}/fd", sentry.tid);
        let socket =
            SentrySocket::of(Arc::clone(&sentry), ours.into(), Goodbyes::plain()).expect("socket");
        let expected = (1, usize::from(!sentry.is_private));
        assert_eq!((copies(&own), copies("/proc/self/fd")), expected);
        for fd in 0..3 {
            let at = |table: &str| std::fs::read_link(format!("{table}/{fd}")).ok();
            let expected = match (sentry.is_private, fd) {
                (true, 0 | 1) => Some("/dev/null".into()),
                _ => at("/proc/self/fd"),
            };
            assert_eq!(at(&own), expected, "descriptor {fd}");
        }
        drop(socket);
        let deadline = Instant::now() + PATIENCE;
        while copies(&own) != 0 {
            assert!(Instant::now() < deadline, "{} copies", copies(&own));
            thread::yield_now();
        }
        drop(theirs);
    }
}

#[test]
fn the_sentry_takes_no_signal() {
    for sentry in sentries() {
        let path = format!("/proc/self/task/{}/status", sentry.tid);
        let status = std::fs::read_to_string(path).expect("its status");
        let line = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).expect("a mask");
        let blocked = u64::from_str_radix(line.trim(), 16).expect("a mask");
        for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGCHLD, libc::SIGUSR1, libc::SIGPROF] {
            assert!(blocked >> (signal - 1) & 1 == 1, "signal {signal}: {line}");
        }
    }
}

#[test]
fn an_event_announces_the_end_by_the_other_side() {
    for sentry in sentries() {
        for (bytes, expected) in [
            (&encode_goodbye()[..], CloseReason::Left),
            (&[0xa5; 16], CloseReason::Protocol),
            (&[], CloseReason::Lost),
        ] {
            let (socket, mut theirs) = pair(&sentry);
            assert_eq!((socket.reason(), count(socket.as_fd())), (None, 1));
            theirs.write_all(bytes).expect("sent");
            drop(theirs);
            assert_eq!(until_over(&socket), expected);
            let deadline = Instant::now() + PATIENCE;
            while count(socket.as_fd()) == 0 {
                assert!(Instant::now() < deadline, "no event for {expected:?}");
                thread::yield_now();
            }
            socket.close();
            assert_eq!(socket.reason(), Some(expected), "the first reason stays");
        }
    }
}

#[test]
fn a_look_sees_an_end_without_a_wait() {
    for sentry in sentries() {
        for _ in 0..200 {
            let (socket, theirs) = pair(&sentry);
            assert_eq!(socket.look(PATIENCE), None);
            drop(theirs);
            assert_eq!(socket.look(PATIENCE), Some(CloseReason::Lost));
            assert_eq!(socket.look(Duration::ZERO), Some(CloseReason::Lost));
        }
    }
}

#[test]
fn a_part_of_a_goodbye_is_no_end_until_the_rest_or_the_end() {
    let [sentry, _] = sentries();
    let (socket, mut theirs) = pair(&sentry);
    theirs.write_all(&encode_goodbye()[..5]).expect("sent");
    thread::sleep(Duration::from_millis(20));
    assert_eq!(socket.reason(), None);
    theirs.write_all(&encode_goodbye()[5..]).expect("sent");
    assert_eq!(until_over(&socket), CloseReason::Left);

    let (socket, mut theirs) = pair(&sentry);
    theirs.write_all(&encode_goodbye()[..5]).expect("sent");
    drop(theirs);
    assert_eq!(until_over(&socket), CloseReason::Protocol);
}

#[test]
fn a_goodbye_is_sent_before_close_returns() {
    for sentry in sentries() {
        let (socket, mut theirs) = pair(&sentry);
        socket.close();
        assert_eq!(socket.reason(), Some(CloseReason::Local));
        theirs.set_nonblocking(true).expect("a socket");
        let mut found = [0; 16];
        theirs.read_exact(&mut found).expect("a goodbye that is there already");
        assert_eq!(found, encode_goodbye()[..]);
        assert_eq!(theirs.read(&mut found).expect("an end"), 0);
    }
}

#[test]
fn a_dropped_socket_ends_without_a_goodbye() {
    for sentry in sentries() {
        let (socket, mut theirs) = pair(&sentry);
        drop(socket);
        assert_eq!(theirs.read(&mut [0; 16]).expect("an end"), 0);
        let inbox = lock(&sentry.shared.inbox);
        assert!(inbox.incoming.is_empty() && inbox.commands.is_empty(), "{inbox:?}");
    }
}

#[test]
fn without_a_sentry_all_connections_are_refused_and_ended() {
    for sentry in sentries() {
        let (socket, mut theirs) = pair(&sentry);
        let underway = Arc::new(ConnectionState::new(Goodbyes::plain()));
        lock(&sentry.shared.inbox).incoming.insert(77, Arc::clone(&underway));
        // No other code sends such a message. It ends the thread.
        rustix::net::send(&sentry.handoff, b"short", SendFlags::NOSIGNAL).expect("sent");
        let refused = Stage::Refused(Errno::PIPE);
        assert_eq!(underway.wait_while_in(Stage::Sent, PATIENCE), refused);
        assert_eq!(socket.peer.wait_while_in(Stage::Watched, PATIENCE), refused);
        assert_eq!(socket.reason(), Some(CloseReason::Local));
        assert_eq!(theirs.read(&mut [0; 16]).expect("an end"), 0);
        assert!(sentry.shared.is_gone.load(Ordering::Acquire));
        socket.close();
        let (ours, mut theirs) = UnixStream::pair().expect("sockets");
        theirs.set_read_timeout(Some(PATIENCE)).expect("a socket");
        let error =
            SentrySocket::of(Arc::clone(&sentry), ours.into(), Goodbyes::plain()).unwrap_err();
        let expected = [io::ErrorKind::BrokenPipe, io::ErrorKind::ConnectionReset];
        assert!(expected.contains(&error.kind()), "{error}");
        assert_eq!(theirs.read(&mut [0; 16]).expect("an end"), 0);
    }
}

#[test]
fn a_message_without_all_descriptors_is_refused_and_the_next_is_taken() {
    for sentry in sentries() {
        // Messages arrive like this if the table is full.
        for num_fds in [0, 1] {
            let (ours, mut theirs) = UnixStream::pair().expect("sockets");
            theirs.set_read_timeout(Some(PATIENCE)).expect("a socket");
            let peer = Arc::new(ConnectionState::new(Goodbyes::plain()));
            lock(&sentry.shared.inbox).incoming.insert(77, Arc::clone(&peer));
            send(&sentry.handoff, ADOPT, 77, &[ours.as_fd()][..num_fds]).expect("sent");
            drop(ours);
            let stage = peer.wait_while_in(Stage::Sent, PATIENCE);
            assert_eq!(stage, Stage::Refused(Errno::MFILE));
            assert_eq!(theirs.read(&mut [0; 16]).expect("an end"), 0);
        }
        let (socket, theirs) = pair(&sentry);
        drop(theirs);
        assert_eq!(until_over(&socket), CloseReason::Lost);
    }
}

#[test]
fn a_socket_without_a_waiter_is_closed() {
    for sentry in sentries() {
        let (ours, mut theirs) = UnixStream::pair().expect("sockets");
        theirs.set_read_timeout(Some(PATIENCE)).expect("a socket");
        let event = event_fd().expect("an event");
        send(&sentry.handoff, ADOPT, 77, &[ours.as_fd(), event.as_fd()]).expect("sent");
        drop(ours);
        assert_eq!(theirs.read(&mut [0; 16]).expect("an end"), 0);
    }
}

#[test]
fn a_sentry_ends_with_its_last_connection_and_the_process_gets_another() {
    let first = Sentry::get().expect("a sentry");
    assert!(Arc::ptr_eq(&first, &Sentry::get().expect("the same")));
    rustix::net::send(&first.handoff, b"short", SendFlags::NOSIGNAL).expect("sent");
    let deadline = Instant::now() + PATIENCE;
    while !first.shared.is_gone.load(Ordering::Acquire) {
        assert!(Instant::now() < deadline);
        thread::yield_now();
    }
    let second = Sentry::get().expect("another");
    assert!(!Arc::ptr_eq(&first, &second));
    let (socket, theirs) = pair(&second);
    drop(theirs);
    assert_eq!(until_over(&socket), CloseReason::Lost);

    let [private, _] = sentries();
    let (socket, mut theirs) = pair(&private);
    let shared = Arc::clone(&private.shared);
    drop((private, socket));
    assert_eq!(theirs.read(&mut [0; 16]).expect("an end"), 0);
    while !shared.is_gone.load(Ordering::Acquire) {
        assert!(Instant::now() < deadline);
        thread::yield_now();
    }
}
