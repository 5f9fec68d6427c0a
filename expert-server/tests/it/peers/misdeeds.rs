//! Peers that break the protocol, and reads that fail in this server.

use std::os::unix::fs::FileExt;

use kernels::gpu::{DeviceName, Gpu};
use test_support::own_process::is_alone;

use super::gpu::{check_gpu_answers, device_bytes};
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

/// The files of a server go bad while it serves, so it cannot read what it is assigned later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn experts_that_a_background_load_cannot_read_are_reported() {
    let mut rng = seeded();
    let folders = Folders::random(&mut rng, Preset::MiniDeepseekV3);
    let own = tempfile::tempdir().expect("a folder");
    for entry in std::fs::read_dir(&folders.full).expect("the files").flatten() {
        std::fs::copy(entry.path(), own.path().join(entry.file_name())).expect("copied");
    }
    let mut control = ControlConfig::new("127.0.0.1:0", 1, 1);
    let mut balance = BalanceSettings::default();
    balance.goals.min_replicas = 1;
    balance.settle = Duration::from_millis(50);
    control.balance = Some(balance);
    let fleet = Fleet::start(control).await;
    let a = fleet.server("a", &folders.full, WeightsFrom::Disk).await;
    a.serving(PATIENCE).await.expect("a serves");
    let b = fleet.server("b", own.path(), WeightsFrom::Disk).await;
    b.serving(PATIENCE).await.expect("b serves");
    let share = b.holds().num_experts();
    assert!(share < num_experts(&folders.full), "{share} experts");

    damage_weights(own.path());
    fleet.client().set_goals(&FleetGoals { replicas: 2, spare: 0.0 }).await.expect("new goals");
    let deadline = Instant::now() + PATIENCE;
    let unreadable = loop {
        let members = fleet.members().await;
        let b = members.into_iter().find(|member| member.name == "b").expect("a member");
        match b.load.map(|load| load.unreadable) {
            Some(unreadable) if !unreadable.is_empty() => break unreadable,
            _ => assert!(Instant::now() < deadline, "b reports nothing"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    let held = b.holds();
    assert_eq!(held.num_experts(), share);
    for entry in &unreadable.layers {
        assert!(entry.experts.iter().all(|&expert| !held.contains(entry.layer, expert)));
    }
    for server in [a, b] {
        server.shutdown().await;
    }
}

/// Makes all values of a checkpoint's fp8 tensors NaN, in the files that servers have mapped.
fn damage_weights(dir: &Path) {
    for entry in std::fs::read_dir(dir).expect("the files").flatten() {
        if entry.path().extension().is_none_or(|extension| extension != "safetensors") {
            continue;
        }
        let bytes = std::fs::read(entry.path()).expect("read");
        let header = u64::from_le_bytes(*bytes.first_chunk().expect("a length"));
        let data = 8 + header as usize;
        let file = std::fs::OpenOptions::new().write(true).open(entry.path()).expect("opened");
        let damage = vec![0xff; bytes.len() - data];
        file.write_all_at(&damage, data as u64).expect("written");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damage_between_gpus_sends_the_reader_to_the_host() {
    if !is_alone("peers::misdeeds::damage_between_gpus_sends_the_reader_to_the_host") {
        return;
    }
    let scenario = fail::FailScenario::setup();
    let (near, far) = (DeviceName::Emulated(0), DeviceName::Emulated(1));
    let mut rng = seeded();
    let folders = Folders::random(&mut rng, Preset::MiniDeepseekV3);
    let reference = Reference::of(&folders.full);
    let fleet = Fleet::of_replicas().await;
    let source = fleet.gpu_config("g", &folders.full, WeightsFrom::Disk, near);
    let source = start(source).await;
    fail::cfg("server::in_device_copy", "return").expect("a failpoint");
    let reader = fleet.gpu_config("h", &folders.bare, WeightsFrom::Peers, far);
    let reader = start(reader).await;
    assert_eq!(read_bytes(&reader, "peer"), reader.expert_bytes() as f64);
    assert_eq!((device_bytes(&reader), damaged(&reader)), (0.0, 0.0));
    source.shutdown().await;
    let gpu = Gpu::open_emulated(2).expect("a GPU in software");
    check_gpu_answers(&gpu, &reader, &reference, &mut rng).await;
    reader.shutdown().await;
    scenario.teardown();
}
