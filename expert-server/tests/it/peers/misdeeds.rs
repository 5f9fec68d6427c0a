//! Peers that break the protocol, and reads that fail in this server.

use test_support::own_process::is_alone;

use super::*;
use crate::device::devices;

fn damaged(server: &RunningServer) -> f64 {
    metric(server.metrics(), "switchyard_server_weights_damaged_total")
}

/// The digest of such an expert is right, so it protects no reader.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scales_of_types_that_scales_cannot_have_are_refused() {
    let Some((device, _gpu)) = devices() else { return };
    let mut rng = seeded();
    // fp8 in blocks, which a GPU takes as it arrives.
    let folders = Folders::random(&mut rng, Preset::MiniDeepseekV3);
    let fleet = Fleet::of_replicas().await;
    let honest = fleet.server("honest", &folders.full, WeightsFrom::Disk).await;
    let raw = RawPeer::join(&fleet.url, "raw", &folders.full, Misdeed::OddScales).await;
    raw.copy_all();
    let on_cpu = fleet.config("c", &folders.bare, WeightsFrom::Peers);
    let on_gpu = fleet.gpu_config("g", &folders.bare, WeightsFrom::Peers, device);
    for config in [on_cpu, on_gpu] {
        let before = raw.num_granted();
        let server = start(config).await;
        let num_granted = raw.num_granted() - before;
        assert!(num_granted > 0, "the peer was asked");
        assert_eq!(damaged(&server), num_granted as f64);
        assert_eq!(read_bytes(&server, "peer"), server.expert_bytes() as f64);
        assert_eq!(server.holds(), honest.holds());
        server.shutdown().await;
    }
    honest.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_expert_whose_read_panics_is_read_again() {
    if !is_alone("peers::misdeeds::an_expert_whose_read_panics_is_read_again") {
        return;
    }
    let scenario = fail::FailScenario::setup();
    let mut rng = seeded();
    let folders = Folders::random(&mut rng, Preset::TinyQwen3Moe);
    let reference = Reference::of(&folders.full);
    let fleet = Fleet::of_replicas().await;
    let mut servers = vec![fleet.server("a", &folders.full, WeightsFrom::Disk).await];
    // Server b has to ask the same peer again, and c can ask another one.
    for name in ["b", "c"] {
        fail::cfg("server::in_weights_read", "1*panic").expect("a failpoint");
        let server = fleet.server(name, &folders.bare, WeightsFrom::Peers).await;
        assert_eq!(server.holds(), servers[0].holds());
        assert_eq!(read_bytes(&server, "peer"), server.expert_bytes() as f64);
        check_answers(&server, &reference, &mut rng).await;
        servers.push(server);
    }
    for server in servers {
        server.shutdown().await;
    }
    scenario.teardown();
}
