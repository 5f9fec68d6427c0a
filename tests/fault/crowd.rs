//! Too many peers, silent peers, peers that connect and leave.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::support::{PATIENCE, Setup, client, rig, runtime};

const NUM_SILENT: usize = 1000;

#[test]
fn a_thousand_silent_connections_to_any_listener_delay_nobody_and_are_ended() {
    let _ = p2p_core::bootstrap::raise_descriptor_limit();
    let mut setup = Setup::start(1, 1, 32, |_| {});
    let runtime = runtime();
    let member = setup.members(&runtime).remove(0);
    let control = setup.cluster.control_url().replace("http://", "");
    let addrs = [member.data_addr, control, member.metrics_addr.expect("metrics")];
    let mut silent = JoinSet::new();
    let connected = Arc::new(AtomicUsize::new(0));
    let num_peers = addrs.len() * NUM_SILENT;
    for (idx, addr) in addrs.iter().cycle().take(num_peers).enumerate() {
        let peer = silent_peer(addr.clone(), idx % 10 == 0, Arc::clone(&connected));
        silent.spawn_on(peer, runtime.handle());
    }
    setup.compute_until("connections", |_, _| connected.load(Ordering::Relaxed) == num_peers);
    // A newcomer among them: it asks the control plane, connects, and computes.
    let begin = Instant::now();
    setup.client = client(&setup.cluster, &setup.pool).build().expect("a client");
    setup.client.wait_ready(PATIENCE).expect("ready");
    let ready = begin.elapsed();
    setup.compute(20);
    println!("ready after {ready:?}, 20 layers after {:?}", begin.elapsed());
    assert!(setup.failovers().is_empty(), "{:?}", setup.failovers());
    let ended = runtime.block_on(async {
        let all = async {
            while let Some(peer) = silent.join_next().await {
                peer.expect("a peer")
            }
        };
        tokio::time::timeout(PATIENCE, all).await
    });
    println!("all silent connections ended after {:?}", begin.elapsed());
    ended.expect("silent connections are ended");
    setup.compute(5);
    setup.assert_accounts();
}

/// Sends nothing, or one byte a second, until the other side ends the connection.
///
/// A connection that did not fit into the other side's accept queue exists on this side alone. Its first byte shows
/// that. So even a silent peer sends one, after 20 s, when the other side should have ended the connection.
async fn silent_peer(addr: String, drips: bool, connected: Arc<AtomicUsize>) {
    // A peer that cannot connect would prove nothing.
    let mut stream = TcpStream::connect(addr).await.expect("connected");
    connected.fetch_add(1, Ordering::Relaxed);
    let mut buffer = [0; 256];
    let pause = Duration::from_secs(if drips { 1 } else { 20 });
    loop {
        tokio::select! {
            read = stream.read(&mut buffer) => match read {
                Ok(0) | Err(_) => return,
                Ok(_) => {}
            },
            () = tokio::time::sleep(pause) => {
                if stream.write_all(b"G").await.is_err() {
                    return;
                }
            }
        }
    }
}

#[test]
fn clients_that_come_and_go_leave_neither_descriptors_nor_memory() {
    let run = rig("churn --connections 600");
    assert_eq!(run.code, Some(0), "{}", run.report);
    assert_eq!(run.report["connections"], 600);
    assert!(run.report["layers"].as_u64() >= Some(2));
}
