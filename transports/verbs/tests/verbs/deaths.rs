//! Peers that leave, are killed, or lose their port.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use p2p_core::endpoint::{Endpoint, PostError, Progress, QuietError};
use p2p_core::network::{JoinedSide, Network, SideDescription};
use p2p_core::{AnyEndpoint, Region, RemoteRange, SlotKey};
use rand::RngExt;
use rand::rngs::StdRng;

use crate::common::{
    LIMIT, ROUTE, exchange, is_possible, layout, network, pair, put, put_now, seeded, store,
};

#[test]
fn a_side_that_goes_is_noticed_when_it_is_written_to() {
    if !is_possible() {
        return;
    }
    let network = network(1);
    let layout = layout(64 << 10);
    let (mut here, there) = pair(&network, &layout);
    let source = Region::anonymous(4096).unwrap();
    here.endpoint.register(&source).unwrap();
    drop(there);
    let start = Instant::now();
    let failed = put(&mut here.endpoint, &source, 0, 64)
        .map_err(QuietError::from)
        .and_then(|()| here.endpoint.quiet(Instant::now() + LIMIT));
    assert!(matches!(failed, Err(QuietError::Post(_))), "{failed:?} after {:?}", start.elapsed());
    // The other side of a working pair is unaffected.
    let (mut here, mut there) = pair(&network, &layout);
    exchange(&mut here, &mut there);
}

/// A peer is killed amid many operations: an error is reported at once, and all memory is released.
#[test]
fn a_killed_peer_is_an_error_within_the_limit() {
    if !is_possible() {
        return;
    }
    let mut rng = seeded();
    let network = network(1);
    let layout = layout(1 << 20);
    let source = Region::anonymous(512 << 10).unwrap();
    let (mut bystander, mut other) = pair(&network, &layout);
    for round in 0..6 {
        let side = network.open(&layout, ROUTE).unwrap();
        let mut child = child_process(&side.description(), &[]);
        let theirs = read_description(&mut child);
        let JoinedSide { mut endpoint, slot } = side.join(&theirs).unwrap();
        endpoint.register(&source).unwrap();
        writeln!(child.stdin.as_mut().unwrap()).unwrap();
        // Some operations to begin with, then the peer dies among more of them.
        let num_before = rng.random_range(0..40);
        let mut num_done = 0;
        let mut died = None;
        let failed = loop {
            if num_done == num_before {
                child.kill().unwrap();
                died = Some(Instant::now());
            }
            let failed = one_operation(&mut endpoint, &source, &mut rng);
            num_done += 1;
            if let Err(error) = failed {
                break error;
            }
            let waited = died.map_or(Duration::ZERO, |died: Instant| died.elapsed());
            assert!(waited < LIMIT, "no error {waited:?} after the death in round {round}");
        };
        let waited = died.map(|died| died.elapsed());
        println!("round {round}: {num_done} operations, after {waited:?}: {failed}");
        assert!(matches!(failed, QuietError::Post(PostError::Transport { .. })), "{failed}");
        child.wait().unwrap();
        drop((endpoint, slot));
        // The dead pair no longer uses the memory: it can be written, and it is the bystander's source.
        store(&source, &[round as u8; 1000]);
        exchange(&mut bystander, &mut other);
    }
}

/// The link goes down under a peer: its health fails without any operation.
#[test]
fn a_port_that_goes_down_is_noticed_without_an_operation() {
    // The test takes the device away from other tests, so it runs only on request.
    let Ok(interface) = std::env::var("SWITCHYARD_TEST_LINK") else { return };
    if !is_possible() {
        return;
    }
    let network = network(1);
    let layout = layout(64 << 10);
    let (mut here, mut there) = pair(&network, &layout);
    exchange(&mut here, &mut there);
    let set = |state: &str| {
        let done = Command::new("ip").args(["link", "set", &interface, state]).status();
        assert!(done.unwrap().success());
    };
    set("down");
    let deadline = Instant::now() + LIMIT;
    while here.endpoint.health().is_ok() {
        assert!(Instant::now() < deadline, "the port is down and nobody noticed");
        std::thread::sleep(Duration::from_millis(1));
    }
    let text = here.endpoint.health().unwrap_err().to_string();
    set("up");
    assert!(text.contains("port of this side went down"), "{text}");
    let refused = put_now(&mut here.endpoint, &Region::anonymous(4096).unwrap());
    assert!(refused.is_err());
    // When the port is back, the same network serves new peers.
    loop {
        assert!(Instant::now() < deadline, "the port is up again and takes no peers");
        let opened = (network.open(&layout, ROUTE), network.open(&layout, ROUTE));
        if let (Ok(a), Ok(b)) = opened {
            let (at_a, at_b) = (a.description(), b.description());
            if let (Ok(mut a), Ok(mut b)) = (a.join(&at_b), b.join(&at_a)) {
                exchange(&mut a, &mut b);
                break;
            }
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The other side of a test, in a process of its own.
pub fn peer_process() {
    let described = std::env::args().nth(1).expect("a description of the other side");
    let network = network(1);
    let side = network.open(&layout(1 << 20), ROUTE).unwrap();
    println!("description {}", encode(&side.description()));
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let _joined = side.join(&decode(&described)).unwrap();
    println!("joined");
    std::thread::sleep(Duration::from_secs(120));
}

/// Starts a process for the other side, with these environment variables.
pub fn child_process(described: &SideDescription, variables: &[(&str, &str)]) -> Child {
    test_support::child::command("peer")
        .arg(encode(described))
        .envs(variables.iter().copied())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Lets the child join, and reads its description.
pub fn read_description(child: &mut Child) -> SideDescription {
    let stdout = child.stdout.as_mut().unwrap();
    let mut reader = BufReader::new(stdout);
    let mut find = |mark: &str| loop {
        let mut line = String::new();
        assert_ne!(reader.read_line(&mut line).unwrap(), 0, "the child ended");
        if let Some(rest) = line.trim().strip_prefix(mark) {
            break rest.trim().to_owned();
        }
    };
    let described = find("description");
    writeln!(child.stdin.as_mut().unwrap()).unwrap();
    find("joined");
    decode(&described)
}

fn encode(described: &SideDescription) -> String {
    let SideDescription { address, remote_key, bytes, detail } = described;
    let detail: Vec<_> = detail.iter().map(u8::to_string).collect();
    format!("{address} {remote_key} {bytes} {}", detail.join(","))
}

fn decode(text: &str) -> SideDescription {
    let parts: Vec<_> = text.split(' ').collect();
    SideDescription {
        address: parts[0].parse().unwrap(),
        remote_key: parts[1].parse().unwrap(),
        bytes: parts[2].parse().unwrap(),
        detail: parts[3].split(',').map(|byte| byte.parse().unwrap()).collect(),
    }
}

fn one_operation(
    endpoint: &mut AnyEndpoint,
    source: &Region,
    rng: &mut StdRng,
) -> Result<(), QuietError> {
    let len = rng.random_range(1..=source.len());
    let remote = RemoteRange { key: SlotKey, offset: 0, len };
    match rng.random_range(0..4) {
        0 => put(endpoint, source, 0, len)?,
        // SAFETY: no code reads the memory meanwhile, and its content is irrelevant.
        1 => unsafe { endpoint.get(source.range(0, len).unwrap(), remote)? },
        2 => endpoint.add_flag(RemoteRange { key: SlotKey, offset: 0, len: 8 }, 1)?,
        _ => endpoint.quiet(Instant::now() + LIMIT)?,
    }
    Ok(())
}
