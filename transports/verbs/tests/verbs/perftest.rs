//! Foreign peers: the tools of perftest, each in a process of its own.
//!
//! The tools exchange over TCP, in hexadecimal text, the same facts as this project's handshake. Here this process
//! replaces one of two tools. It converts the tool's text into a description, and the transport joins it like any
//! peer. The test checks moved bytes in the tool's memory, not by RDMA. The tool's own report must agree.
//!
//! The tests exclude rping. It exchanges its keys by SEND on a queue pair that librdmacm owns. This transport posts
//! no SEND and makes its queue pairs itself, so rping would test none of its code.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use p2p_core::Region;
use p2p_core::endpoint::{Endpoint, PostError, QuietError};
use p2p_core::fabric::{
    Access, Fabric, LocalSegment, PostOutcome, RemoteSegment, Token, WireRegion,
};
use p2p_core::network::{JoinedSide, Network, OpenSide, SideDescription};
use p2p_core::{RemoteRange, SlotKey};
use rand::{Rng, RngExt};
use switchyard_verbs::device_names;

use crate::common::{
    LIMIT, ROUTE, bytes_of, counter, counter_from, fabric, is_possible, layout, network, put,
    register, seeded, store, wait_one,
};
use test_support::skip;

/// Size of a message, of a tool's buffer, and of a slot, in bytes.
const BYTES: usize = 64 << 10;

#[test]
fn ib_write_bw_gets_what_is_put() {
    let Some(mut tool) = Tool::serve("ib_write_bw", &["-s", "65536", "-n", "23"]) else { return };
    let mut rng = seeded();
    let (mut joined, keys) = tool.join(&|_| {});
    let before = tool.memory(keys.address, BYTES);
    let (offset, len) = (rng.random_range(1..1000), rng.random_range(40_000..60_000));
    let mut expected = vec![0; len];
    rng.fill_bytes(&mut expected);
    assert_ne!(before[offset..offset + len], expected);
    let source = Region::anonymous(BYTES).unwrap();
    joined.endpoint.register(&source).unwrap();
    store(&source, &expected);
    let sent = counter("sent_pkts");
    put(&mut joined.endpoint, &source, offset, len).unwrap();
    joined.endpoint.quiet(Instant::now() + LIMIT).unwrap();
    let after = tool.memory(keys.address, BYTES);
    assert_eq!(after[offset..offset + len], expected);
    assert_eq!(after[..offset], before[..offset]);
    assert_eq!(after[offset + len..], before[offset + len..]);
    if let Some(before) = sent {
        // No packet carries more than 4 KiB.
        counter_from("sent_pkts", before + len as u64 / 4096);
    }
    // The tool prints the figures that its peer reports.
    let said = tool.finish(BYTES as u64, 23, [12.5, 3.25, 0.5]);
    let row = said.lines().filter_map(row_of).next_back().expect("a row of figures");
    assert_eq!(row, ["65536", "23", "12.50", "3.25", "0.500000"], "{said}");
}

#[test]
fn a_wrong_key_of_ib_write_bw_is_named() {
    let Some(mut tool) = Tool::serve("ib_write_bw", &["-s", "65536", "-n", "5"]) else { return };
    let (mut joined, keys) = tool.join(&|keys| keys.key ^= 0xff00);
    let before = tool.memory(keys.address, BYTES);
    let source = Region::anonymous(BYTES).unwrap();
    joined.endpoint.register(&source).unwrap();
    store(&source, &before.iter().map(|byte| !byte).collect::<Vec<_>>());
    let refused = put(&mut joined.endpoint, &source, 0, 4096)
        .map_err(QuietError::from)
        .and_then(|()| joined.endpoint.quiet(Instant::now() + LIMIT));
    let Err(QuietError::Post(error)) = refused else { panic!("{refused:?}") };
    let text = error.to_string();
    assert!(matches!(error, PostError::Transport { op: "put", code: 10, .. }), "{text}");
    for part in ["denies access", "127.0.0.1", "vendor code", &format!("{:#x}", keys.address)] {
        assert!(text.contains(part), "{text} lacks {part}");
    }
    assert!(tool.memory(keys.address, BYTES) == before, "the tool's memory was touched");
}

#[test]
fn ib_write_bw_is_a_peer_of_a_fabric_too() {
    let Some(mut tool) = Tool::serve("ib_write_bw", &["-s", "65536", "-n", "9"]) else { return };
    let mut rng = seeded();
    let mut fabric = fabric();
    let (peer, detail) = fabric.open_peer_on(ROUTE).unwrap();
    let keys = tool.meet(&Keys::of_detail(&detail, 0));
    // A fabric sends keys with its memory. The key field then holds the index of the peer's device.
    let described = Keys { key: 0, ..keys.clone() };
    fabric.join_peer(peer, &described.detail(&detail)).unwrap();
    tool.agree();
    let source = Region::anonymous(BYTES).unwrap();
    let from = register(&mut fabric, &source, Access::Local);
    let mut expected = vec![0; BYTES];
    rng.fill_bytes(&mut expected);
    store(&source, &expected);
    let region = WireRegion { address: keys.address, bytes: BYTES as u64, key: keys.key.into() };
    let write = |fabric: &mut switchyard_verbs::VerbsFabric, region, token| {
        let src = LocalSegment { region: from, offset: 0, bytes: BYTES as u64 };
        let dst = RemoteSegment { region, offset: 0 };
        // SAFETY: the source is not written before the completion.
        assert_eq!(unsafe { fabric.write(peer, dst, src, token) }.unwrap(), PostOutcome::Accepted);
        wait_one(fabric)
    };
    assert!(write(&mut fabric, region, Token(1)).result.is_ok());
    assert!(tool.memory(keys.address, BYTES) == expected);
    let wrong = WireRegion { key: region.key ^ 0xff00, ..region };
    let text = write(&mut fabric, wrong, Token(2)).result.unwrap_err().to_string();
    let range = format!("65536 bytes at {:#x} with key {:#x}", wrong.address, wrong.key);
    assert!(text.contains("denies access") && text.contains(&range), "{text}");
}

#[test]
fn what_ib_read_bw_holds_is_read_and_not_written() {
    let Some(mut tool) = Tool::serve("ib_read_bw", &["-s", "65536", "-n", "5"]) else { return };
    let mut rng = seeded();
    let (mut joined, keys) = tool.join(&|_| {});
    let mut expected = vec![0; BYTES];
    rng.fill_bytes(&mut expected);
    tool.set_memory(keys.address, &expected);
    let target = Region::anonymous(BYTES).unwrap();
    joined.endpoint.register(&target).unwrap();
    store(&target, &[0xa5; BYTES]);
    let remote = RemoteRange { key: SlotKey, offset: 0, len: BYTES };
    // SAFETY: no code reads the memory before the quiet.
    unsafe { joined.endpoint.get(target.range(0, BYTES).unwrap(), remote) }.unwrap();
    joined.endpoint.quiet(Instant::now() + LIMIT).unwrap();
    assert!(bytes_of(&target) == expected);
    store(&target, &[0xa5; BYTES]);
    let refused = put(&mut joined.endpoint, &target, 0, 100)
        .map_err(QuietError::from)
        .and_then(|()| joined.endpoint.quiet(Instant::now() + LIMIT));
    let text = refused.unwrap_err().to_string();
    // Devices differ in their error for a queue pair that accepts no writes at all.
    let is_named = ["denies access", "refuses the request as invalid"];
    assert!(text.contains("put") && is_named.iter().any(|part| text.contains(part)), "{text}");
    assert!(tool.memory(keys.address, BYTES) == expected);
}

#[test]
fn ib_atomic_bw_gets_every_addition() {
    let Some(mut tool) = Tool::serve("ib_atomic_bw", &["-n", "40"]) else { return };
    let mut rng = seeded();
    let (mut joined, keys) = tool.join(&|_| {});
    let mut expected = rng.random::<u64>();
    tool.set_memory(keys.address + 64, &expected.to_ne_bytes());
    for _ in 0..40 {
        let value = rng.random();
        expected = expected.wrapping_add(value);
        let flag = RemoteRange { key: SlotKey, offset: 64, len: 8 };
        joined.endpoint.add_flag(flag, value).unwrap();
    }
    joined.endpoint.quiet(Instant::now() + LIMIT).unwrap();
    assert_eq!(tool.memory(keys.address + 64, 8), expected.to_ne_bytes());
    let said = tool.finish(8, 40, [1.5, 2.5, 3.5]);
    let row = said.lines().filter_map(row_of).next_back().expect("a row of figures");
    assert_eq!(row, ["8", "40", "1.50", "2.50", "3.500000"], "{said}");
}

#[test]
fn ib_write_lat_plays_with_either_side_beginning() {
    // More than 255, because the tool writes the low byte of the round.
    const ROUNDS: usize = 300;
    for tool_serves in [false, true] {
        let rounds = ROUNDS.to_string();
        let args = ["-s", "64", "-n", &rounds];
        let tool = if tool_serves { Tool::serve } else { Tool::call };
        let Some(mut tool) = tool("ib_write_lat", &args) else { return };
        let (mut joined, _) = tool.join(&|_| {});
        tool.step();
        let source = Region::anonymous(4096).unwrap();
        joined.endpoint.register(&source).unwrap();
        // SAFETY: in range, mapped as long as the slot, and only accessed atomically.
        let last = unsafe { AtomicU8::from_ptr(joined.slot.as_ptr().add(63).as_ptr()) };
        for round in 1..=ROUNDS {
            let wait = || {
                let deadline = Instant::now() + LIMIT;
                while last.load(Ordering::Acquire) != round as u8 {
                    assert!(Instant::now() < deadline, "no answer in round {round}");
                    std::thread::yield_now();
                }
            };
            // The server starts.
            if tool_serves {
                wait();
            }
            store(&source, &[round as u8; 64]);
            put(&mut joined.endpoint, &source, 0, 64).unwrap();
            joined.endpoint.quiet(Instant::now() + LIMIT).unwrap();
            if !tool_serves {
                wait();
            }
        }
        let said = tool.end();
        let row = said.lines().filter_map(row_of).next_back().expect("a row of figures");
        assert_eq!(row[..2], ["64", &rounds], "{said}");
    }
}

#[test]
fn tools_reach_a_slot_as_their_peer() {
    let mut rng = seeded();
    let mut data = vec![0; BYTES];
    for name in ["ib_write_bw", "ib_read_bw", "ib_atomic_bw"] {
        let size: &[&str] = if name == "ib_atomic_bw" { &[] } else { &["-s", "65536"] };
        let args = [size, &["-n", "50"]].concat();
        let Some(mut tool) = Tool::call(name, &args) else { return };
        rng.fill_bytes(&mut data);
        let slot = if name == "ib_atomic_bw" { vec![0; BYTES] } else { data.clone() };
        let (joined, keys) = tool.join_with(&slot, &|_| {});
        // The tool sends from, or reads into, the half below its published address.
        let own = keys.address - BYTES as u64;
        match name {
            "ib_write_bw" => {
                rng.fill_bytes(&mut data);
                tool.set_memory(own, &data);
                tool.report();
                assert!(bytes_of(&joined.slot) == data);
            }
            "ib_read_bw" => {
                tool.set_memory(own, &[0x5a; BYTES]);
                tool.report();
                assert!(tool.memory(own, BYTES) == data);
            }
            _ => {
                tool.report();
                let bytes = bytes_of(&joined.slot);
                let words = bytes.as_chunks::<8>().0.iter();
                let sum: u64 = words.map(|word| u64::from_ne_bytes(*word)).sum();
                assert_eq!(sum, 50, "one is added in each of fifty rounds");
            }
        }
        tool.let_go();
        tool.end();
    }
}

/// Queue pair and memory in the form that tools exchange.
#[derive(Debug, Clone)]
struct Keys {
    lid: u16,
    num_responses: u32,
    number: u32,
    first_packet: u32,
    key: u32,
    address: u64,
    gid: Vec<u8>,
}

impl Keys {
    /// Converts this project's description into the form of the tools.
    fn of_detail(detail: &[u8], address: u64) -> Self {
        let word = |at: usize| u32::from_le_bytes(detail[at..at + 4].try_into().unwrap());
        Self {
            lid: word(16) as u16,
            num_responses: detail[19].into(),
            number: word(4),
            first_packet: word(8),
            key: word(12),
            address,
            gid: detail[20..36].to_vec(),
        }
    }

    /// Converts the tool's values into a description. `own` supplies the values that the tool does not send.
    fn detail(&self, own: &[u8]) -> Vec<u8> {
        let mut detail = own.to_vec();
        detail[4..8].copy_from_slice(&self.number.to_le_bytes());
        detail[8..12].copy_from_slice(&self.first_packet.to_le_bytes());
        detail[12..16].copy_from_slice(&self.key.to_le_bytes());
        detail[16..18].copy_from_slice(&self.lid.to_le_bytes());
        detail[19] = self.num_responses.min(255) as u8;
        detail[20..36].copy_from_slice(&self.gid);
        detail
    }

    fn encode(&self) -> Vec<u8> {
        let gid: Vec<_> = self.gid.iter().map(|byte| format!("{byte:02x}")).collect();
        let text = format!(
            "{:04x}:{:04x}:{:06x}:{:06x}:{:08x}:{:016x}:{}:{:08x}:\0",
            self.lid,
            self.num_responses,
            self.number,
            self.first_packet,
            self.key,
            self.address,
            gid.join(":"),
            0
        );
        assert_eq!(text.len(), KEYS_BYTES);
        text.into_bytes()
    }

    fn decode(bytes: &[u8]) -> Self {
        let text = std::str::from_utf8(bytes).unwrap();
        let parts: Vec<u64> = text
            .split(':')
            .take(22)
            .map(|part| u64::from_str_radix(part, 16).unwrap_or_else(|_| panic!("{text}")))
            .collect();
        Self {
            lid: parts[0] as u16,
            num_responses: parts[1] as u32,
            number: parts[2] as u32,
            first_packet: parts[3] as u32,
            key: parts[4] as u32,
            address: parts[5],
            gid: parts[6..22].iter().map(|part| *part as u8).collect(),
        }
    }
}

/// A tool in a process of its own, killed on drop.
struct Tool {
    child: Child,
    stream: TcpStream,
    version: String,
    /// True if the tool sends first, as it does when it is the client.
    is_client: bool,
    own: Option<Keys>,
}

impl Tool {
    /// Runs the tool as a server. `None` if that is not possible.
    fn serve(name: &str, args: &[&str]) -> Option<Self> {
        let version = version(name)?;
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut child = spawn(name, args, port, None);
        let deadline = Instant::now() + LIMIT;
        let stream = loop {
            match TcpStream::connect((Ipv4Addr::LOCALHOST, port)) {
                Ok(stream) => break stream,
                Err(error) => {
                    let ended = child.try_wait().unwrap();
                    assert!(ended.is_none(), "{name} ended: {}", said(&mut child));
                    assert!(Instant::now() < deadline, "{name} does not listen: {error}");
                    std::thread::sleep(Duration::from_millis(20));
                }
            }
        };
        Some(Self::new(child, stream, version, false))
    }

    /// Runs the tool as a client of this process.
    fn call(name: &str, args: &[&str]) -> Option<Self> {
        let version = version(name)?;
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let child = spawn(name, args, port, Some("127.0.0.1"));
        let (stream, _) = listener.accept().unwrap();
        Some(Self::new(child, stream, version, true))
    }

    fn new(child: Child, stream: TcpStream, version: String, is_client: bool) -> Self {
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream.set_nodelay(true).unwrap();
        Self { child, stream, version, is_client, own: None }
    }

    /// Exchanges equally long messages; the client sends first.
    fn exchange(&mut self, own: &[u8]) -> Vec<u8> {
        let mut theirs = vec![0; own.len()];
        if !self.is_client {
            self.stream.write_all(own).unwrap();
        }
        if let Err(error) = self.stream.read_exact(&mut theirs) {
            let _ = self.child.kill();
            panic!("the tool says nothing: {error}; {}", said(&mut self.child));
        }
        if self.is_client {
            self.stream.write_all(own).unwrap();
        }
        theirs
    }

    /// Performs the exchange up to the keys.
    fn meet(&mut self, own: &Keys) -> Keys {
        let mut version = [0; 16];
        version[..self.version.len()].copy_from_slice(self.version.as_bytes());
        self.exchange(&version);
        // Page size, cache line size, path MTU.
        self.exchange(&4096u32.to_be_bytes());
        self.exchange(&64u32.to_be_bytes());
        self.exchange(b"5\0");
        self.own = Some(own.clone());
        Keys::decode(&self.exchange(&own.encode()))
    }

    /// Repeats the last message of each side. The tools do so when their queue pairs are ready, and before they
    /// start.
    fn agree(&mut self) {
        for _ in 0..2 {
            self.step();
        }
    }

    fn step(&mut self) {
        let own = self.own.as_ref().expect("keys").encode();
        self.exchange(&own);
    }

    /// Joins one of this process's slots with the tool, after `spoil` has changed the tool's keys.
    fn join(&mut self, spoil: &dyn Fn(&mut Keys)) -> (JoinedSide, Keys) {
        self.join_with(&[], spoil)
    }

    /// Like `join`, with these bytes in the slot.
    fn join_with(&mut self, slot: &[u8], spoil: &dyn Fn(&mut Keys)) -> (JoinedSide, Keys) {
        let network = network(1);
        let side = network.open(&layout(BYTES), ROUTE).unwrap();
        let described = side.description();
        let keys = self.meet(&Keys::of_detail(&described.detail, described.address));
        let mut told = keys.clone();
        spoil(&mut told);
        let joined = join(side, &described, &told);
        store(&joined.slot, slot);
        self.agree();
        (joined, keys)
    }

    fn memory(&self, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let memory = File::open(format!("/proc/{}/mem", self.child.id())).unwrap();
        memory.read_exact_at(&mut bytes, address).unwrap();
        bytes
    }

    fn set_memory(&self, address: u64, bytes: &[u8]) {
        let path = format!("/proc/{}/mem", self.child.id());
        let memory = File::options().write(true).open(path).unwrap();
        memory.write_all_at(bytes, address).unwrap();
    }

    /// Exchanges the measured figures, after a bandwidth test.
    fn report(&mut self) -> Vec<Vec<u8>> {
        self.step();
        (0..5).map(|_| self.exchange(&[0; 8])).collect()
    }

    /// Exchanges the final messages of a bandwidth test.
    fn let_go(&mut self) {
        self.step();
        if self.is_client {
            self.stream.write_all(b"done\0").unwrap();
        }
    }

    /// Completes a bandwidth test with these figures. Returns the tool's whole output.
    fn finish(mut self, bytes: u64, rounds: u64, figures: [f64; 3]) -> String {
        self.step();
        self.exchange(&bytes.to_be_bytes());
        self.exchange(&rounds.to_be_bytes());
        for figure in figures {
            self.exchange(&figure.to_be_bytes());
        }
        self.let_go();
        let mut last = [0; 5];
        self.stream.read_exact(&mut last).unwrap();
        assert_eq!(&last, b"done\0");
        self.end()
    }

    /// Waits for the tool to exit, which must succeed.
    fn end(mut self) -> String {
        let deadline = Instant::now() + LIMIT;
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < deadline, "the tool does not end");
            std::thread::sleep(Duration::from_millis(5));
        };
        let said = said(&mut self.child);
        assert!(status.success(), "{status}: {said}");
        said
    }
}

impl Drop for Tool {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn join(side: Box<dyn OpenSide>, own: &SideDescription, keys: &Keys) -> JoinedSide {
    let described = SideDescription {
        address: keys.address,
        remote_key: keys.key.into(),
        bytes: own.bytes,
        detail: keys.detail(&own.detail),
    };
    side.join(&described).unwrap()
}

fn spawn(name: &str, args: &[&str], port: u16, server: Option<&str>) -> Child {
    Command::new(name)
        .args(["-d", &device_names()[0], "-F", "-p", &port.to_string()])
        .args(args)
        .args(server)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn said(child: &mut Child) -> String {
    let mut text = String::new();
    let _ = child.stdout.take().map(|mut out| out.read_to_string(&mut text));
    let _ = child.stderr.take().map(|mut out| out.read_to_string(&mut text));
    text
}

/// The version that the tool reports. Returns `None`, and says so, if the tool is missing or its keys have another
/// form.
fn version(name: &str) -> Option<String> {
    if !is_possible() {
        return None;
    }
    if network(1).flavour() != "roce2" {
        skip("perftest", &format!("{name} tells no address over InfiniBand"));
        return None;
    }
    let Ok(output) = Command::new(name).arg("--version").output() else {
        skip("perftest", &format!("there is no {name}: install perftest"));
        return None;
    };
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let version = text.split_whitespace().last().expect("a version").to_owned();
    assert!(version.len() < 16, "{text}");
    Some(version)
}

/// The columns of a row of figures.
fn row_of(line: &str) -> Option<Vec<&str>> {
    let row: Vec<_> = line.split_whitespace().collect();
    let is_row = row.first()?.parse::<u64>().is_ok() && row.len() >= 5;
    is_row.then_some(row)
}

const KEYS_BYTES: usize = 108;
