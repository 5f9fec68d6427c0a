//! An attacker who guesses: each attack has a queue pair of its own to the server, and asks for memory of another
//! client with a guessed key. The device refuses each request, no byte changes, and the other client goes on.

use std::time::Instant;

use p2p_core::endpoint::{Endpoint, PostError, QuietError};
use p2p_core::network::{JoinedSide, Network, SideDescription};
use p2p_core::{Region, RemoteRange, SlotKey, SlotLayout};
use rand::rngs::StdRng;
use rand::{Rng, RngExt};
use switchyard_verbs::{VerbsConfig, VerbsNetwork, device_names};

use crate::common::{LIMIT, ROUTE, bytes_of, is_possible, layout, put, seeded, store};

const SLOT_BYTES: usize = 16 << 10;
/// Bytes of one guessed write or read. An addition has eight.
const ATTACK_BYTES: usize = 64;
/// Of each kind of request, beside the attacks with keys near those of the victim.
const NUM_RANDOM: usize = 24;
/// Clients that left, whose keys the attacker knows.
const NUM_EXPIRED: usize = 3;
/// Attacks between two puts of the legitimate client.
const ATTACKS_PER_PUT: usize = 16;
/// The device refuses access to remote memory: `IBV_WC_REM_ACCESS_ERR`.
const DENIED: i64 = 10;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Request {
    Write,
    Read,
    Add,
}

const REQUESTS: [Request; 3] = [Request::Write, Request::Read, Request::Add];

/// Memory of the server that no attack may change.
struct Guarded {
    name: &'static str,
    memory: Region,
    /// Address and key of the slot in that memory. The keys of left clients are revoked.
    address: u64,
    key: u32,
    expected: Vec<u8>,
}

impl Guarded {
    fn fill(name: &'static str, memory: Region, side: &SideDescription, rng: &mut StdRng) -> Self {
        let mut expected = vec![0; memory.len()];
        rng.fill_bytes(&mut expected);
        store(&memory, &expected);
        let key = side.remote_key.try_into().unwrap();
        Self { name, memory, address: side.address, key, expected }
    }

    fn check(&self, after: &str) {
        let found = bytes_of(&self.memory);
        let changed = found.iter().zip(&self.expected).position(|(found, want)| found != want);
        assert_eq!(changed, None, "{after}, byte of {} that changed", self.name);
    }

    /// An address in the slot at which an attack has room.
    fn address(&self, rng: &mut StdRng) -> u64 {
        self.address + rng.random_range(0..=(SLOT_BYTES - ATTACK_BYTES) as u64 / 8) * 8
    }
}

/// A client and the server's side of its connection.
struct Client {
    joined: JoinedSide,
    _server: JoinedSide,
    source: Region,
}

impl Client {
    /// Also returns the server's slot, with its description.
    fn connect(network: &VerbsNetwork, layout: &SlotLayout) -> (Self, Region, SideDescription) {
        let (near, far) =
            (network.open(layout, ROUTE).unwrap(), network.open(layout, ROUTE).unwrap());
        let (at_near, at_far) = (near.description(), far.description());
        let (mut joined, server) = (near.join(&at_far).unwrap(), far.join(&at_near).unwrap());
        let source = Region::anonymous(SLOT_BYTES).unwrap();
        joined.endpoint.register(&source).unwrap();
        let slot = server.slot.clone();
        (Self { joined, _server: server, source }, slot, at_far)
    }

    /// Puts random bytes into its slot and reads others back.
    fn go_on(&mut self, slot: &mut Guarded, rng: &mut StdRng) {
        let len = rng.random_range(1..1024);
        let offset = rng.random_range(0..SLOT_BYTES - len);
        rng.fill_bytes(&mut slot.expected[offset..offset + len]);
        store(&self.source, &slot.expected[offset..offset + len]);
        put(&mut self.joined.endpoint, &self.source, offset, len).unwrap();
        self.joined.endpoint.quiet(Instant::now() + LIMIT).unwrap();
        slot.check("a put of its own client");
        let offset = rng.random_range(0..SLOT_BYTES - len);
        let remote = RemoteRange { key: SlotKey, offset, len };
        // SAFETY: no code reads the memory before the quiet.
        unsafe { self.joined.endpoint.get(self.source.range(0, len).unwrap(), remote) }.unwrap();
        self.joined.endpoint.quiet(Instant::now() + LIMIT).unwrap();
        assert!(bytes_of(&self.source)[..len] == slot.expected[offset..offset + len]);
    }
}

/// Carries out one request of a client that has a valid connection of its own. The request asks for the address and
/// key of `aim`, or for the client's own slot without them.
fn attempt(
    network: &VerbsNetwork,
    layout: &SlotLayout,
    request: Request,
    aim: Option<(u64, u32)>,
) -> Result<(), QuietError> {
    let (near, far) = (network.open(layout, ROUTE).unwrap(), network.open(layout, ROUTE).unwrap());
    let (at_near, mut at_far) = (near.description(), far.description());
    if let Some((address, key)) = aim {
        at_far.address = address;
        at_far.remote_key = key.into();
        // The place of the first queue pair's key, see `detail.rs`.
        at_far.detail[12..16].copy_from_slice(&key.to_le_bytes());
    }
    let (mut near, far) = (near.join(&at_far).unwrap(), far.join(&at_near).unwrap());
    let memory = Region::anonymous(ATTACK_BYTES).unwrap();
    near.endpoint.register(&memory).unwrap();
    store(&memory, &[0xc3; ATTACK_BYTES]);
    store(&far.slot, &vec![0x5a; SLOT_BYTES]);
    let before = (bytes_of(&memory), bytes_of(&far.slot));
    let remote = RemoteRange { key: SlotKey, offset: 0, len: ATTACK_BYTES };
    let posted = match request {
        Request::Write => put(&mut near.endpoint, &memory, 0, ATTACK_BYTES),
        // SAFETY: no code reads the memory before the quiet.
        Request::Read => unsafe {
            near.endpoint.get(memory.range(0, ATTACK_BYTES).unwrap(), remote)
        },
        Request::Add => near.endpoint.add_flag(RemoteRange { len: 8, ..remote }, 0x0101_0101),
    };
    let outcome =
        posted.map_err(QuietError::from).and_then(|()| near.endpoint.quiet(Instant::now() + LIMIT));
    let (has_read, has_written) = (bytes_of(&memory) != before.0, bytes_of(&far.slot) != before.1);
    let is_own = aim.is_none();
    assert_eq!(has_read, is_own && request == Request::Read, "{request:?}, {aim:x?}: has it read?");
    assert_eq!(has_written, is_own && request != Request::Read, "{request:?}, {aim:x?}: written?");
    outcome
}

#[test]
fn guessed_keys_open_nothing_and_the_victim_goes_on() {
    if !is_possible() {
        return;
    }
    let mut rng = seeded();
    let config = VerbsConfig {
        gid_index: gid_index(),
        send_queue_depth: 16,
        ack_timeout: 16,
        retry_count: 3,
        ..Default::default()
    };
    let network = VerbsNetwork::open(config).unwrap();
    let layout = layout(SLOT_BYTES);
    let (mut client, slot, side) = Client::connect(&network, &layout);
    let mut victim = Guarded::fill("the victim's slot", slot, &side, &mut rng);
    let (_idle, slot, side) = Client::connect(&network, &layout);
    let other = Guarded::fill("another client's slot", slot, &side, &mut rng);
    let mut guarded = vec![other];
    for _ in 0..NUM_EXPIRED {
        let (left, slot, side) = Client::connect(&network, &layout);
        guarded.push(Guarded::fill("the slot of a client that left", slot, &side, &mut rng));
        drop(left);
    }
    // The server's memory beside the slots is registered nowhere.
    let memory = Region::anonymous(SLOT_BYTES).unwrap();
    let address = memory.as_ptr().as_ptr() as u64;
    let side = SideDescription { address, ..side };
    guarded.push(Guarded::fill("memory that is no slot", memory, &side, &mut rng));

    let attacks = attacks(&victim, &guarded, &mut rng);
    // The attacks can succeed: with the keys that were given out, the same requests reach the attacker's own slot.
    for request in REQUESTS {
        attempt(&network, &layout, request, None).unwrap();
    }
    for (num, &(request, address, key)) in attacks.iter().enumerate() {
        let attack = format!("attack {num}, {request:?} at {address:#x} with key {key:#x}");
        let outcome = attempt(&network, &layout, request, Some((address, key)));
        assert!(
            matches!(outcome, Err(QuietError::Post(PostError::Transport { code: DENIED, .. }))),
            "{attack}: {outcome:?}"
        );
        victim.check(&attack);
        if num % ATTACKS_PER_PUT == 0 {
            client.go_on(&mut victim, &mut rng);
            guarded.iter().for_each(|memory| memory.check(&attack));
        }
    }
    println!("{} attacks", attacks.len());
    guarded.iter().for_each(|memory| memory.check("all attacks"));
    client.go_on(&mut victim, &mut rng);
}

/// The device's first RoCE v2 address of IPv4. Looking through all thousand entries takes longer than an attack.
fn gid_index() -> Option<u8> {
    let port = format!("/sys/class/infiniband/{}/ports/1", device_names().first()?);
    let read = |file: String| std::fs::read_to_string(file).unwrap_or_default();
    (0..=u8::MAX).find(|idx| {
        read(format!("{port}/gid_attrs/types/{idx}")).trim() == "RoCE v2"
            && read(format!("{port}/gids/{idx}")).starts_with("0000:0000:0000:0000:0000:ffff:")
    })
}

/// Requests, addresses and keys.
fn attacks(victim: &Guarded, others: &[Guarded], rng: &mut StdRng) -> Vec<(Request, u64, u32)> {
    let mut attacks = Vec::new();
    // Keys of the victim's place in the device's table: the low byte tells registrations apart that use it in turn.
    for low in 0..=0xff {
        let request = REQUESTS[rng.random_range(0..REQUESTS.len())];
        attacks.push((request, victim.address(rng), (victim.key & !0xff) | low));
    }
    for request in REQUESTS {
        // The best guess of all: the victim's own key, at its own address.
        attacks.push((request, victim.address, victim.key));
        // Keys of places nearby: what the server has registered before and after, for the victim and for others.
        for distance in 1..=8 {
            for key in [
                victim.key.wrapping_add(distance << 8),
                victim.key.wrapping_sub(distance << 8),
                victim.key ^ (1 << (8 + 2 * distance)),
            ] {
                attacks.push((request, victim.address(rng), key));
            }
        }
        for other in others {
            // A key of another slot or an expired one, at its own address and at the victim's.
            attacks.push((request, other.address(rng), other.key));
            attacks.push((request, victim.address(rng), other.key));
            attacks.push((request, other.address(rng), victim.key));
        }
        for _ in 0..NUM_RANDOM {
            attacks.push((request, victim.address(rng), rng.next_u32()));
        }
    }
    attacks
}
