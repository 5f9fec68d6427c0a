//! Many peers connect at the same time to a listener that accepts few at a time.
use crate::support::crowd::Crowd;
use crate::support::{transports, wanted_peers};
use p2p_core::SlotConfig;
use p2p_core::bootstrap::ListenerConfig;

/// Peers wait for each other: no connect fails.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_storm_is_served_in_turn() {
    let Some(transports) = transports() else { return };
    let slot = SlotConfig { slot_bytes: 64 << 10, num_frames: 2 };
    let num_peers = Crowd::possible(wanted_peers(512));
    let config = ListenerConfig { max_handshakes: 16, ..Crowd::listener(slot, transports) };
    let crowd = Crowd::gather(num_peers, config).await;
    println!("{num_peers} peers, 16 at a time, in {:?}", crowd.took);
    for (idx, (here, there)) in crowd.here.iter().zip(&crowd.there).enumerate() {
        assert_eq!((here.peer.peer_id, there.peer.peer_id), (idx as u64, idx as u64));
    }
}
