//! Peers that send nonsense, too much, or nothing: the program reports the error by its deadline.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use crate::run::{alone, connect, listen};

/// For peers that say something, on a machine that may be busy.
const PATIENT: [&str; 6] = ["--json", "--software-nic", "--timeout", "30", "--queues", "2"];
/// For peers that do not: three times this is the deadline, by which they must have played their part.
const HASTY: [&str; 6] = ["--json", "--software-nic", "--timeout", "4", "--queues", "2"];
const MAGIC: &[u8; 8] = b"SYBRING4";
const HELLO: u16 = 1;
const DESCRIPTION: u16 = 2;
const MARK: u16 = 3;
const HEADER_BYTES: usize = 16;
const HELLO_BYTES: usize = 40;
const CONNECT: u8 = 5;

fn header(kind: u16, len: u32) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(kind.to_le_bytes());
    bytes.extend([0; 2]);
    bytes.extend(len.to_le_bytes());
    bytes
}

fn message(kind: u16, payload: &[u8]) -> Vec<u8> {
    [header(kind, payload.len() as u32), payload.to_vec()].concat()
}

/// A peer made by hand.
struct Fake {
    stream: TcpStream,
}

impl Fake {
    fn connect(address: SocketAddr) -> Self {
        Self::of(TcpStream::connect(address).unwrap())
    }

    fn of(stream: TcpStream) -> Self {
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        Self { stream }
    }

    fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    fn receive(&mut self, kind: u16) -> Vec<u8> {
        let mut header = [0; HEADER_BYTES];
        self.stream.read_exact(&mut header).unwrap();
        assert_eq!(&header[..8], MAGIC);
        assert_eq!(u16::from_le_bytes([header[8], header[9]]), kind);
        let len = u32::from_le_bytes([header[12], header[13], header[14], header[15]]);
        let mut payload = vec![0; len as usize];
        self.stream.read_exact(&mut payload).unwrap();
        payload
    }

    /// Messages of a correct peer with the same options.
    fn hello(&mut self) -> Vec<u8> {
        let mut hello = self.receive(HELLO);
        assert_eq!(hello.len(), HELLO_BYTES);
        hello[0] ^= 1;
        hello
    }

    /// Takes the other side through the stage `connect`, as a mirror of itself.
    fn join(&mut self) {
        let hello = self.hello();
        self.send(&message(HELLO, &hello));
        let description = self.receive(DESCRIPTION);
        self.send(&message(DESCRIPTION, &description));
        assert_eq!(self.receive(MARK), [CONNECT, 1, 0, 0]);
        self.send(&message(MARK, &[CONNECT, 1, 0, 0]));
    }
}

/// Whether there are device functions to come as far as the connection.
fn can_post() -> bool {
    softnic_driver::Driver::product().is_some()
}

/// Actions of a hand-made peer, and the expected report.
type Case = (&'static str, &'static [&'static str], fn(&mut Fake));

/// Runs a listener against each hand-made peer.
fn expect_each(options: &[&str], stage: &str, cases: &[Case]) {
    std::thread::scope(|scope| {
        for (name, parts, misbehave) in cases {
            scope.spawn(move || {
                let (listener, address) = listen(options);
                let mut fake = Fake::connect(address);
                misbehave(&mut fake);
                println!("{name}");
                // The connection stays open, so that nothing but the deadline ends a wait for more.
                listener.end().expect_failure(1, stage, parts);
            });
        }
    });
}

#[test]
fn greetings_that_are_none() {
    if !can_post() {
        return;
    }
    fn change(fake: &mut Fake, at: usize, value: &[u8]) {
        let mut hello = fake.hello();
        hello[at..at + value.len()].copy_from_slice(value);
        fake.send(&message(HELLO, &hello));
    }
    expect_each(
        &PATIENT,
        "connect",
        &[
            ("magic", &["first bytes are [47, 45, 54", "another program"], |fake| {
                fake.send(b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n");
            }),
            ("another version", &["first bytes", "another version"], |fake| {
                fake.send(&[b"SYBRING9", &header(HELLO, 40)[8..], &[0; 40]].concat());
            }),
            ("length", &["greeting has a length of 4294967295, expected 40"], |fake| {
                fake.send(&header(HELLO, u32::MAX));
            }),
            ("one too many", &["length of 41, expected 40"], |fake| fake.send(&header(HELLO, 41))),
            ("one too few", &["length of 39, expected 40"], |fake| fake.send(&header(HELLO, 39))),
            ("kind", &["of kind 2, expected greeting (1)"], |fake| {
                fake.send(&message(DESCRIPTION, &[0; 40]));
            }),
            ("no such kind", &["of kind 77"], |fake| fake.send(&message(77, &[0; 40]))),
            ("reserved bytes of the header", &["`reserved` is 1"], |fake| {
                let mut bytes = message(HELLO, &[0; 40]);
                bytes[10] = 1;
                fake.send(&bytes);
            }),
            ("role", &["`role` is 7, expected 0 or 1"], |fake| change(fake, 0, &[7])),
            ("path", &["`path` is 2"], |fake| change(fake, 1, &[2])),
            ("first stage", &["`first stage` is 0"], |fake| change(fake, 3, &[0])),
            ("last stage", &["`last stage` is 18"], |fake| change(fake, 4, &[18])),
            ("reserved", &["`reserved`"], |fake| change(fake, 6, &[1])),
            ("gpu", &["`gpu` is 2, expected 0 or 1"], |fake| change(fake, 5, &[2])),
            ("same role", &["the role", "one side listens"], |fake| change(fake, 0, &[0])),
            ("queues", &["--queues 4294967295, this side with 2"], |fake| {
                change(fake, 8, &[0xff; 4]);
            }),
            ("slot", &["slots of bytes 0"], |fake| change(fake, 24, &[0; 8])),
        ],
    );
}

#[test]
fn peers_that_stall_or_leave_in_the_middle() {
    if !can_post() {
        return;
    }
    expect_each(
        &HASTY,
        "connect",
        &[
            ("silent", &["stalls: 0 of 16 bytes of its greeting", "12000 ms"], |_| {}),
            ("in the header", &["stalls: 9 of 16 bytes of its greeting"], |fake| {
                fake.send(&header(HELLO, 40)[..9]);
            }),
            ("in the greeting", &["stalls: 17 of 40 bytes of its greeting"], |fake| {
                fake.send(&[&header(HELLO, 40)[..], &[0; 17]].concat());
            }),
            ("left", &["closed the connection after 3 of 16 bytes of its greeting"], |fake| {
                fake.send(&MAGIC[..3]);
                fake.receive(HELLO);
                fake.stream.shutdown(std::net::Shutdown::Write).unwrap();
            }),
            ("before the description", &["stalls: 0 of 16 bytes of its description"], |fake| {
                let hello = fake.hello();
                fake.send(&message(HELLO, &hello));
            }),
            ("in the description", &["stalls: 55 of 56 bytes of its description"], |fake| {
                let hello = fake.hello();
                fake.send(&message(HELLO, &hello));
                let description = fake.receive(DESCRIPTION);
                let bytes = message(DESCRIPTION, &description);
                fake.send(&bytes[..bytes.len() - 1]);
            }),
            ("before it is ready", &["stalls: 0 of 16 bytes of its note of a stage"], |fake| {
                let hello = fake.hello();
                fake.send(&message(HELLO, &hello));
                let description = fake.receive(DESCRIPTION);
                fake.send(&message(DESCRIPTION, &description));
            }),
        ],
    );
}

/// A byte now and then does not keep the other side waiting for ever.
#[test]
fn a_peer_that_drips_is_given_up_by_the_deadline() {
    if !can_post() {
        return;
    }
    let (listener, address) = listen(&HASTY);
    let mut fake = Fake::connect(address);
    let drip = std::thread::spawn(move || {
        // A whole greeting takes more than twice as long as the deadline.
        for byte in message(HELLO, &[0; 40]).into_iter().cycle() {
            if fake.stream.write_all(&[byte]).is_err() {
                break;
            }
            std::thread::sleep(Duration::from_millis(500));
        }
    });
    listener.end().expect_failure(1, "connect", &["the peer stalls: ", "bytes of its greeting"]);
    drip.join().unwrap();
}

#[test]
fn descriptions_that_make_no_sense() {
    if !can_post() {
        return;
    }
    fn change(fake: &mut Fake, at: usize, value: &[u8]) {
        let hello = fake.hello();
        fake.send(&message(HELLO, &hello));
        let mut description = fake.receive(DESCRIPTION);
        description[at..at + value.len()].copy_from_slice(value);
        fake.send(&message(DESCRIPTION, &description));
    }
    expect_each(
        &PATIENT,
        "connect",
        &[
            (
                "length",
                &["description of its queues has a length of 1073741824, expected 56"],
                |fake| {
                    let hello = fake.hello();
                    fake.send(&message(HELLO, &hello));
                    fake.receive(DESCRIPTION);
                    fake.send(&header(DESCRIPTION, 1 << 30));
                },
            ),
            ("version", &["`version` is 9"], |fake| change(fake, 0, &[9])),
            ("mtu", &["`mtu` is 200"], |fake| change(fake, 2, &[200])),
            ("slot address", &["`slot address` is 0"], |fake| change(fake, 24, &[0; 8])),
            ("slot bytes", &["`slot bytes`"], |fake| change(fake, 32, &[0xff; 8])),
            ("first packet", &["`psn`", "expected 24 bits"], |fake| change(fake, 47, &[1])),
            ("queue pair", &["`queue pair`"], |fake| change(fake, 52, &[0xff; 4])),
            // No port has this address: the transition to ready to receive is refused.
            ("address", &["ibv_modify_qp failed", "routes"], |fake| change(fake, 8, &[0xff; 16])),
        ],
    );
}

#[test]
fn notes_that_make_no_sense() {
    if !can_post() {
        return;
    }
    fn note(fake: &mut Fake, payload: &[u8]) {
        fake.join();
        fake.send(&message(MARK, payload));
    }
    expect_each(
        &PATIENT,
        "nop",
        &[
            ("another stage", &["`stage` is 7, expected 6 (nop)"], |fake| {
                note(fake, &[7, 1, 1, 0])
            }),
            ("no stage", &["`stage` is 200"], |fake| note(fake, &[200, 1, 1, 0])),
            ("another step", &["`step` is 2, expected 1"], |fake| note(fake, &[6, 1, 2, 0])),
            ("no state", &["`state` is 3"], |fake| note(fake, &[6, 3, 1, 0])),
            ("text where none is due", &["length of 5, expected 4"], |fake| {
                note(fake, &[6, 1, 1, 0, 65]);
            }),
            ("too long", &["length of 1029, expected from 4 to 1028"], |fake| {
                note(fake, &[6; 1029]);
            }),
            ("too short", &["length of 3"], |fake| note(fake, &[6, 1, 1])),
            (
                "a failure with terminal codes",
                &["the peer failed at stage `nop`: red [31m alert"],
                |fake| note(fake, b"\x06\x02\x01\x00red\x1b[31m\nalert"),
            ),
        ],
    );
}

#[test]
fn listeners_that_are_none() {
    if !can_post() {
        return;
    }
    let fake = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = fake.local_addr().unwrap();
    let connector = connect(address, &HASTY);
    let (stream, _) = fake.accept().unwrap();
    connector.end().expect_failure(1, "connect", &["the peer stalls: 0 of 16 bytes"]);
    drop(stream);
    // The listener is gone.
    drop(fake);
    let options = [&HASTY[..], &["--wait", "0.05"]].concat();
    let parts = ["connecting with 127.0.0.1:", "refused"];
    connect(address, &options).end().expect_failure(1, "connect", &parts);
    let arguments = [&["listen", "127.0.0.1:0"], &options[..]].concat();
    alone(&arguments).expect_failure(1, "connect", &["no peer connected within"]);
    // An address of another host is refused before anything else happens.
    let ended = alone(&["listen", "192.0.2.1:0", "--json", "--software-nic"]);
    ended.expect_failure(1, "connect", &["listening at 192.0.2.1:0 failed"]);
}

#[test]
fn a_peer_that_vanishes_between_stages_is_named() {
    if !can_post() {
        return;
    }
    let (listener, address) = listen(&PATIENT);
    let mut fake = Fake::connect(address);
    fake.join();
    drop(fake);
    listener.end().expect_failure(1, "nop", &["closed the connection after 0 of 16 bytes"]);
}
