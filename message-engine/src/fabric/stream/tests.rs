//! Turns: the bytes that one connection moves before the others get theirs. Counted in polls and bytes.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use super::buffered::TURN_BYTES;
use super::wire::{HELLO_BYTES, Place, REQUEST_BYTES, Response};
use super::*;
use p2p_core::region::Region;

/// A fabric with memory that its peers may write.
struct Side {
    fabric: StreamFabric,
    memory: Region,
    region: RegionId,
    out: Vec<Completion>,
}

impl Side {
    fn new(bytes: usize) -> Self {
        let config = TcpConfig { bind: "127.0.0.1:0".parse().unwrap(), ..TcpConfig::default() };
        let mut fabric = StreamFabric::new(config).unwrap();
        let memory = Region::anonymous(bytes).unwrap();
        // SAFETY: the memory is dropped after the fabric.
        let region = unsafe { fabric.register(memory.as_ptr(), bytes, Access::RemoteReadWrite) };
        Self { fabric, memory, region: region.unwrap(), out: Vec::new() }
    }

    fn poll(&mut self) {
        self.fabric.poll(&mut self.out);
    }

    fn remote(&self, offset: u64) -> RemoteSegment {
        RemoteSegment { region: self.fabric.describe(self.region).unwrap(), offset }
    }

    fn local(&self, bytes: u64) -> LocalSegment {
        LocalSegment { region: self.region, offset: 0, bytes }
    }

    fn write(&mut self, peer: PeerId, dst: RemoteSegment, bytes: u64) {
        let src = self.local(bytes);
        // SAFETY: no thread writes the source before the completion.
        let posted = unsafe { self.fabric.write(peer, dst, src, Token(bytes)) }.unwrap();
        assert_eq!(posted, PostOutcome::Accepted);
    }

    fn read(&mut self, peer: PeerId, src: RemoteSegment, bytes: u64) {
        let dst = self.local(bytes);
        // SAFETY: no thread reads the target before the completion.
        let posted = unsafe { self.fabric.read(peer, dst, src, Token(bytes)) }.unwrap();
        assert_eq!(posted, PostOutcome::Accepted);
    }

    fn set(&self, offset: usize, value: u64) {
        assert!(offset + 8 <= self.memory.len());
        // SAFETY: in range; nothing is under way there.
        unsafe { self.memory.as_ptr().add(offset).cast::<u64>().write_unaligned(value) };
    }

    fn get(&self, offset: usize) -> u64 {
        assert!(offset + 8 <= self.memory.len());
        // SAFETY: in range; the fabrics of this test work only while they are polled.
        unsafe { self.memory.as_ptr().add(offset).cast::<u64>().read_unaligned() }
    }

    /// The connection for the peer's requests.
    fn server(&self, peer: PeerId) -> &Server {
        let place = self.fabric.find("find", peer).unwrap();
        self.fabric.servers[self.fabric.peers[place].servers[0].unwrap()].as_ref().unwrap()
    }

    /// The connection for this side's requests.
    fn issuer(&self, peer: PeerId) -> &Issuer {
        let place = self.fabric.find("find", peer).unwrap();
        self.fabric.peers[place].issuer.as_ref().unwrap()
    }
}

/// Joins two sides, and waits until both connections are established.
fn join(a: &mut Side, b: &mut Side) -> (PeerId, PeerId) {
    let (at_a, of_a) = a.fabric.open_peer().unwrap();
    let (at_b, of_b) = b.fabric.open_peer().unwrap();
    a.fabric.join_peer(at_a, &of_b).unwrap();
    b.fabric.join_peer(at_b, &of_a).unwrap();
    a.write(at_a, b.remote(0), 8);
    b.write(at_b, a.remote(0), 8);
    until("the connections", || {
        a.poll();
        b.poll();
        a.out.len() + b.out.len() == 2
    });
    for side in [a, b] {
        side.out.drain(..).for_each(|done| done.result.unwrap());
    }
    (at_a, at_b)
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < Duration::from_secs(60), "still waiting for {what}");
        std::thread::yield_now();
    }
}

const FLOOD_BYTES: u64 = 8 << 20;
const NUM_FLOODS: u64 = 12;
/// Offset behind the flooded range.
const SMALL_AT: u64 = FLOOD_BYTES;
const HUB_BYTES: usize = FLOOD_BYTES as usize + 4096;

/// The hub, a peer that floods it, and a peer with little traffic.
fn overload() -> (Side, (Side, PeerId, PeerId), (Side, PeerId, PeerId)) {
    let (mut hub, mut much) = (Side::new(HUB_BYTES), Side::new(HUB_BYTES));
    let mut little = Side::new(64);
    let (at_hub, at_much) = join(&mut hub, &mut much);
    let (little_at_hub, at_little) = join(&mut hub, &mut little);
    (hub, (much, at_hub, at_much), (little, little_at_hub, at_little))
}

#[test]
fn a_peer_that_writes_without_end_does_not_hold_up_another() {
    let (mut hub, (mut much, much_at_hub, at_much), (mut little, little_at_hub, at_little)) =
        overload();
    for _ in 0..NUM_FLOODS {
        much.write(at_much, hub.remote(0), FLOOD_BYTES);
    }
    let (mut moved, mut num_rounds) = (0, 0);
    while (much.out.len() as u64) < NUM_FLOODS {
        for _ in 0..8 {
            much.poll();
        }
        num_rounds += 1;
        little.set(0, num_rounds);
        little.write(at_little, hub.remote(SMALL_AT), 8);
        let is_there = |hub: &Side| {
            rustix::io::ioctl_fionread(hub.server(little_at_hub).fd()).unwrap()
                == REQUEST_BYTES as u64 + 8
        };
        until("the small write", || {
            little.poll();
            is_there(&hub)
        });
        let (turns, ..) = hub.server(much_at_hub).turns();
        hub.poll();
        // One poll serves the small peer. The flood has had at most one turn.
        assert_eq!(hub.get(SMALL_AT as usize), num_rounds);
        let (turns_now, received, _) = hub.server(much_at_hub).turns();
        assert!(turns_now <= turns + 1, "{} turns in a poll", turns_now - turns);
        assert!(received <= TURN_BYTES, "{received} bytes in a turn");
        moved += if turns_now > turns { received as u64 } else { 0 };
        until("the answer to the small write", || {
            little.poll();
            !little.out.is_empty()
        });
        little.out.drain(..).for_each(|done| done.result.unwrap());
    }
    assert!(moved >= NUM_FLOODS * FLOOD_BYTES, "{moved} bytes");
    assert!(num_rounds >= moved / TURN_BYTES as u64, "{num_rounds} rounds");
    much.out.drain(..).for_each(|done| done.result.unwrap());
}

#[test]
fn a_peer_that_takes_without_end_does_not_hold_up_another() {
    let (mut hub, (mut much, much_at_hub, at_much), (mut little, little_at_hub, _)) = overload();
    // The hub sends in two ways: its own writes, and answers to reads.
    for _ in 0..NUM_FLOODS {
        hub.write(much_at_hub, much.remote(0), FLOOD_BYTES);
        much.read(at_much, hub.remote(0), FLOOD_BYTES);
    }
    let (mut num_large, mut num_small, mut is_small_under_way) = (0, 0, false);
    until("the floods", || {
        for _ in 0..8 {
            much.poll();
        }
        let is_new = !std::mem::replace(&mut is_small_under_way, true);
        if is_new {
            hub.write(little_at_hub, little.remote(0), 8);
        }
        let before = (hub.issuer(much_at_hub).turns().0, hub.server(much_at_hub).turns().0);
        hub.poll();
        let (own, answers) = (hub.issuer(much_at_hub).turns(), hub.server(much_at_hub).turns());
        assert!(own.0 <= before.0 + 1 && answers.0 <= before.1 + 1, "{own:?} {answers:?}");
        assert!(own.2 <= TURN_BYTES && answers.2 <= TURN_BYTES, "{own:?} {answers:?}");
        if is_new {
            // In the same poll, whatever the floods send.
            let (_, _, sent) = hub.issuer(little_at_hub).turns();
            assert_eq!(sent, REQUEST_BYTES + 8);
        }
        little.poll();
        for done in hub.out.drain(..) {
            done.result.unwrap();
            if done.token == Token(8) {
                (num_small, is_small_under_way) = (num_small + 1, false);
            } else {
                num_large += 1;
            }
        }
        num_large == NUM_FLOODS && much.out.len() as u64 == NUM_FLOODS
    });
    much.out.drain(..).for_each(|done| done.result.unwrap());
    assert!(num_small > 0);
}

/// Headers count as bytes: a target that answers a read with empty frames gets no more time.
#[test]
fn answers_without_payload_count_as_well() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut side = Side::new(4096);
    let (peer, _) = side.fabric.open_peer().unwrap();
    let detail = Detail { place: Place::Network(listener.local_addr().unwrap()), nonce: [1; 16] };
    side.fabric.join_peer(peer, &detail.encode()).unwrap();
    let (mut stream, _) = listener.accept().unwrap();
    let region = WireRegion { address: 0, bytes: 4096, key: 7 };
    side.read(peer, RemoteSegment { region, offset: 0 }, 16);
    until("the request", || {
        side.poll();
        rustix::io::ioctl_fionread(&stream).unwrap() == (HELLO_BYTES + REQUEST_BYTES) as u64
    });
    stream.read_exact(&mut [0; HELLO_BYTES + REQUEST_BYTES]).unwrap();
    let flood = std::thread::spawn(move || {
        let frame = |bytes| Response { is_data: true, status: 0, is_last: false, bytes }.encode();
        let nothing = frame(0).repeat(4096);
        for _ in 0..NUM_NOTHINGS {
            stream.write_all(&nothing).unwrap();
        }
        stream.write_all(&frame(16)).unwrap();
        stream.write_all(&[9; 16]).unwrap();
        let verdict = Response { is_data: true, status: 0, is_last: true, bytes: 0 };
        stream.write_all(&verdict.encode()).unwrap();
        stream
    });
    let (mut received, mut num_turns) = (0, 0);
    until("the end of the read", || {
        side.poll();
        let (turns, in_turn, _) = side.issuer(peer).turns();
        assert!(in_turn <= TURN_BYTES, "{in_turn} bytes in a turn");
        received += if turns > num_turns { in_turn as u64 } else { 0 };
        num_turns = turns;
        !side.out.is_empty()
    });
    side.out.pop().unwrap().result.unwrap();
    assert_eq!(side.get(8), u64::from_ne_bytes([9; 8]));
    assert!(received >= NUM_NOTHINGS << 16, "{received} bytes");
    let stream: TcpStream = flood.join().unwrap();
    drop(stream);
}

/// Operations of 64 KiB each: several turns' worth.
const NUM_NOTHINGS: u64 = 64;
