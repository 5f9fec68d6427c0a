//! A peer whose host vanishes: the connection is not closed, only silent.

use std::process::Command;
use std::time::{Duration, Instant};

use p2p_core::PeerHello;
use p2p_core::bootstrap::{CloseReason, ConnectConfig, Listener, ListenerConfig, connect};
use test_support::{child, skip};
use tokio::sync::mpsc;

use crate::support::{PATIENCE, runtime};

/// The shortest timeout that the kernel's clocks allow.
const TIMEOUT: Duration = Duration::from_secs(2);

#[test]
fn a_host_that_vanishes_is_noticed_by_both_ends() {
    if let Err(reason) = can_drop_packets() {
        return skip("netns", &reason);
    }
    let this = std::env::current_exe().expect("the path of this test");
    let output = Command::new("unshare")
        .args(["--net", "--"])
        .arg(this)
        .envs(child::variables("lost-host"))
        .output()
        .expect("unshare starts");
    println!("{}", String::from_utf8_lossy(&output.stdout));
    println!("{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}", output.status);
}

/// The process of that test in a network namespace of its own, whose packets it may drop.
pub fn lose_host() {
    run("ip link set lo up").expect("a loopback device");
    let runtime = runtime();
    runtime.block_on(async {
        let config = ListenerConfig { liveness_timeout: TIMEOUT, ..Default::default() };
        let listener = Listener::bind("127.0.0.1:0", config).await.expect("bound");
        let addr = listener.local_addr();
        let (sender, mut peers) = mpsc::unbounded_channel();
        let on_peer = move |connection| drop(sender.send(connection));
        tokio::spawn(listener.serve(|_| Ok(Vec::new()), on_peer, std::future::pending()));
        let config = ConnectConfig { liveness_timeout: TIMEOUT, ..Default::default() };
        let here = connect(addr, PeerHello::default(), config).await.expect("connected");
        let there = peers.recv().await.expect("a peer");

        // Silent peers are alive as long as their hosts answer.
        tokio::time::sleep(2 * TIMEOUT).await;
        assert_eq!(here.liveness.closed_now(), None);
        assert_eq!(there.liveness.closed_now(), None);

        // Packets of both hosts get lost from here on, so the side that notices last gets no notice from the other.
        run("nft add table inet lost").expect("a table");
        run("nft add chain inet lost arriving { type filter hook input priority 0 ; }")
            .expect("a chain");
        for end in ["sport", "dport"] {
            run(&format!("nft add rule inet lost arriving tcp {end} {} drop", addr.port()))
                .expect("a rule");
        }
        let begin = Instant::now();
        for (name, liveness) in [("client", &here.liveness), ("server", &there.liveness)] {
            let closed = tokio::time::timeout(PATIENCE, liveness.closed()).await;
            println!("{name}: {closed:?} after {:?}, limit {TIMEOUT:?}", begin.elapsed());
            assert_eq!(closed.expect("noticed in time"), CloseReason::Unreachable, "{name}");
        }
    });
}

/// Checks that namespaces can be made and packets dropped here. The error is the reason why not.
fn can_drop_packets() -> Result<(), String> {
    run("unshare --net -- ip link set lo up")?;
    run("unshare --net -- nft add table inet probe")
}

fn run(line: &str) -> Result<(), String> {
    let mut words = line.split(' ');
    let program = words.next().unwrap_or_default();
    let output = Command::new(program).args(words).output();
    let output = output.map_err(|error| format!("cannot run {program}: {error}"))?;
    let message = String::from_utf8_lossy(&output.stderr);
    let message = message.trim();
    output.status.success().then_some(()).ok_or_else(|| format!("`{line}` failed: {message}"))
}
