//! Servers on GPUs that read weights of other servers, and let others read theirs. By default the GPUs are in software;
//! with `SWITCHYARD_TEST_DEVICE=cuda` they are the host's: servers use the first one, and the last one.

use kernels::gpu::{DeviceName, Gpu};
use switchyard_expert_server::device::DeviceOptions;

use super::*;
use crate::common::tiny_moe;
use crate::device::client::Outcome;
use crate::device::{SLOT, check, devices, join};

const DTYPE: WireDtype = WireDtype::Bf16;

impl Fleet {
    pub(super) fn gpu_config(
        &self,
        name: &str,
        dir: &Path,
        from: WeightsFrom,
        device: DeviceName,
    ) -> ServerConfig {
        let mut config = self.config(name, dir, from);
        config.device = Some(DeviceOptions { dtype: DTYPE, ..DeviceOptions::new(device) });
        config.slot = SLOT;
        config
    }

    async fn gpu_server(
        &self,
        name: &str,
        dir: &Path,
        from: WeightsFrom,
        device: DeviceName,
    ) -> RunningServer {
        start(self.gpu_config(name, dir, from, device)).await
    }
}

/// The GPU of a second server.
fn other(device: DeviceName, client: &Gpu) -> DeviceName {
    match device {
        DeviceName::Cuda(_) => client.name(),
        DeviceName::Emulated(_) => DeviceName::Emulated(2),
    }
}

/// Asserts that a GPU server answers random requests to all layers right.
pub(super) async fn check_gpu_answers(
    gpu: &Gpu,
    server: &RunningServer,
    reference: &Reference,
    rng: &mut StdRng,
) {
    let mut client = join(gpu, server, reference.shape, 1, DTYPE).await;
    tokio::task::block_in_place(|| {
        for layer in reference.checkpoint.config().moe_layers() {
            for tokens in [1, 9] {
                let mut request = Request::random(rng, &reference.shape, tokens);
                request.layer = layer;
                let (outcome, rows) = client.layer(&request);
                assert_eq!(outcome, Outcome::Answered, "layer {layer}");
                check(reference, &request, DTYPE, &rows);
            }
        }
    });
}

pub(super) fn device_bytes(server: &RunningServer) -> f64 {
    metric(server.metrics(), "switchyard_server_weights_device_bytes_total")
}

/// Models of both types that GPUs hold: bf16, and fp8 in blocks.
fn models(rng: &mut StdRng) -> [Folders; 2] {
    [trained(), Folders::random(rng, Preset::MiniDeepseekV3)]
}

/// The trained checkpoint, in bf16.
fn trained() -> Folders {
    let root = tempfile::tempdir().expect("a folder");
    let full = tiny_moe();
    let bare = bare_copy(&full, root.path());
    Folders { _root: root, full, bare }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_server_without_weight_files_reads_all_experts_from_servers_on_cpus() {
    let Some((device, gpu)) = devices() else { return };
    let mut rng = seeded();
    for folders in models(&mut rng) {
        let reference = Reference::of(&folders.full);
        let fleet = Fleet::of_replicas().await;
        let a = fleet.server("a", &folders.full, WeightsFrom::Disk).await;
        let b = fleet.server("b", &folders.full, WeightsFrom::Disk).await;
        let g = fleet.gpu_server("g", &folders.bare, WeightsFrom::Peers, device).await;
        g.serving(PATIENCE).await.expect("it serves");
        assert_eq!(g.holds(), a.holds());
        assert_eq!(read_bytes(&g, "peer"), g.expert_bytes() as f64);
        assert_eq!((read_bytes(&g, "disk"), device_bytes(&g)), (0.0, 0.0));
        assert!(sent_bytes(&a) > 0.0 && sent_bytes(&b) > 0.0, "both sources take part");
        for server in [a, b] {
            server.shutdown().await;
        }
        check_gpu_answers(&gpu, &g, &reference, &mut rng).await;
        g.shutdown().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_on_cpus_read_experts_of_a_gpu() {
    let Some((device, gpu)) = devices() else { return };
    let mut rng = seeded();
    for folders in models(&mut rng) {
        let reference = Reference::of(&folders.full);
        let fleet = Fleet::of_replicas().await;
        let g = fleet.gpu_server("g", &folders.full, WeightsFrom::Disk, device).await;
        // Twice, so that the second reads find digests of the first.
        let c = fleet.server("c", &folders.bare, WeightsFrom::Peers).await;
        let first = read_bytes(&c, "peer");
        assert_eq!(first, c.expert_bytes() as f64);
        check_answers(&c, &reference, &mut rng).await;
        c.shutdown().await;
        let d = fleet.server("d", &folders.bare, WeightsFrom::Peers).await;
        check_answers(&d, &reference, &mut rng).await;
        assert_eq!(sent_bytes(&g), 2.0 * g.expert_bytes() as f64);
        eventually("all grants end", || {
            metric(g.metrics(), "switchyard_server_weights_grants") == 0.0
        });
        check_gpu_answers(&gpu, &g, &reference, &mut rng).await;
        for server in [d, g] {
            server.shutdown().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gpus_of_one_host_copy_experts_from_each_other() {
    let Some((device, gpu)) = devices() else { return };
    let mut rng = seeded();
    for folders in models(&mut rng) {
        let reference = Reference::of(&folders.full);
        let fleet = Fleet::of_replicas().await;
        let g = fleet.gpu_server("g", &folders.full, WeightsFrom::Disk, device).await;
        let to = other(device, &gpu);
        let h = fleet.gpu_server("h", &folders.bare, WeightsFrom::Peers, to).await;
        assert_eq!(h.holds(), g.holds());
        assert_eq!(device_bytes(&h), h.expert_bytes() as f64);
        assert_eq!(sent_bytes(&g), h.expert_bytes() as f64);
        check_gpu_answers(&gpu, &g, &reference, &mut rng).await;
        // The weights are h's own: the source may go.
        g.shutdown().await;
        check_gpu_answers(&gpu, &h, &reference, &mut rng).await;
        // A chain, back to the first GPU.
        let i = fleet.gpu_server("i", &folders.bare, WeightsFrom::Auto, device).await;
        assert_eq!(device_bytes(&i), h.expert_bytes() as f64);
        h.shutdown().await;
        check_gpu_answers(&gpu, &i, &reference, &mut rng).await;
        i.shutdown().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_of_the_host_is_preferred_to_servers_on_cpus() {
    let Some((device, gpu)) = devices() else { return };
    let fleet = Fleet::of_replicas().await;
    let folders = trained();
    let a = fleet.server("a", &folders.full, WeightsFrom::Disk).await;
    let b = fleet.server("b", &folders.full, WeightsFrom::Disk).await;
    let g = fleet.gpu_server("g", &folders.full, WeightsFrom::Disk, device).await;
    let h = fleet.gpu_server("h", &folders.bare, WeightsFrom::Peers, other(device, &gpu)).await;
    assert_eq!(device_bytes(&h), h.expert_bytes() as f64);
    assert_eq!((sent_bytes(&a), sent_bytes(&b)), (0.0, 0.0));
    for server in [a, b, g, h] {
        server.shutdown().await;
    }
}

/// GPUs in software reach those of their group of eight only.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_that_does_not_reach_the_sources_gpu_reads_through_the_host() {
    let mut rng = seeded();
    let folders = Folders::random(&mut rng, Preset::MiniDeepseekV3);
    let reference = Reference::of(&folders.full);
    let fleet = Fleet::of_replicas().await;
    let (near, far) = (DeviceName::Emulated(0), DeviceName::Emulated(8));
    let g = fleet.gpu_server("g", &folders.full, WeightsFrom::Disk, near).await;
    let h = fleet.gpu_server("h", &folders.bare, WeightsFrom::Peers, far).await;
    assert_eq!((read_bytes(&h, "peer"), device_bytes(&h)), (h.expert_bytes() as f64, 0.0));
    g.shutdown().await;
    let gpu = Gpu::open_emulated(9).expect("a GPU in software");
    check_gpu_answers(&gpu, &h, &reference, &mut rng).await;
    h.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damaged_weights_never_reach_the_service_of_a_gpu() {
    let Some((device, gpu)) = devices() else { return };
    let mut rng = seeded();
    let folders = trained();
    let reference = Reference::of(&folders.full);
    let fleet = Fleet::of_replicas().await;
    let honest = fleet.server("honest", &folders.full, WeightsFrom::Disk).await;
    let raw = RawPeer::join(&fleet.url, "raw", &folders.full, Misdeed::FlipBit).await;
    let g = fleet.gpu_server("g", &folders.bare, WeightsFrom::Peers, device).await;
    let damaged = metric(g.metrics(), "switchyard_server_weights_damaged_total");
    assert!(raw.num_granted() > 0, "the damaged peer was asked");
    assert_eq!(damaged, raw.num_granted() as f64);
    assert_eq!(read_bytes(&g, "peer"), g.expert_bytes() as f64);
    check_gpu_answers(&gpu, &g, &reference, &mut rng).await;
    for server in [honest, g] {
        server.shutdown().await;
    }
}

/// With files a GPU takes experts from the disk when no server lets it read.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_falls_back_to_its_files() {
    let Some((device, gpu)) = devices() else { return };
    let mut rng = seeded();
    let folders = trained();
    let reference = Reference::of(&folders.full);
    let fleet = Fleet::of_replicas().await;
    let mut config = fleet.config("limited", &folders.full, WeightsFrom::Disk);
    config.weights.read_limit = 0;
    let closed = start(config).await;
    let g = fleet.gpu_server("g", &folders.full, WeightsFrom::Auto, device).await;
    assert_eq!(read_bytes(&g, "disk"), g.expert_bytes() as f64);
    check_gpu_answers(&gpu, &g, &reference, &mut rng).await;
    for server in [closed, g] {
        server.shutdown().await;
    }
}

/// A GPU without files that copied widened weights of a GPU passes them on to GPUs, and to no server on a CPU.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn widened_weights_stay_on_gpus_along_a_chain() {
    let Some((device, gpu)) = devices() else { return };
    let mut rng = seeded();
    let mut num_formats = 0;
    for full in recorded_folders("reference-formats") {
        let checkpoint = Checkpoint::open(&full).expect("it opens");
        let model = checkpoint.config();
        let layer = model.moe_layers()[0];
        let stored = checkpoint.expert(layer, 0).expect("an expert").up.format();
        if !model.hidden.is_multiple_of(128) || stored.code_bits() != 4 {
            continue;
        }
        let root = tempfile::tempdir().expect("a folder");
        let bare = bare_copy(&full, root.path());
        let fleet = Fleet::of_replicas().await;
        let g = fleet.gpu_server("g", &full, WeightsFrom::Disk, device).await;
        let h = fleet.gpu_server("h", &bare, WeightsFrom::Peers, other(device, &gpu)).await;
        assert_eq!(device_bytes(&h), h.expert_bytes() as f64, "{full:?}");
        g.shutdown().await;
        let mut config = fleet.config("c", &bare, WeightsFrom::Peers);
        config.weights.peer_timeout = Duration::from_millis(500);
        refused_start(config, "widened to bf16").await;
        let i = fleet.gpu_server("i", &bare, WeightsFrom::Peers, device).await;
        assert_eq!(device_bytes(&i), h.expert_bytes() as f64, "{full:?}");
        let shape = crate::common::shape_of(&checkpoint);
        let mut request = Request::random(&mut rng, &shape, 9);
        request.layer = layer;
        let mut answers = Vec::new();
        for server in [&h, &i] {
            let mut client = join(&gpu, server, shape, 1, DTYPE).await;
            let (outcome, rows) = tokio::task::block_in_place(|| client.layer(&request));
            assert_eq!(outcome, Outcome::Answered, "{full:?}");
            answers.push(rows.iter().map(|value| value.to_bits()).collect::<Vec<_>>());
        }
        assert_eq!(answers[0], answers[1], "{full:?}");
        for server in [h, i] {
            server.shutdown().await;
        }
        num_formats += 1;
        // The copies know no formats: a few stand for all.
        if num_formats == 3 {
            break;
        }
    }
    assert_eq!(num_formats, 3);
}

/// Weights of other formats become bf16 on the way to the GPU, as they do from files.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn quantised_experts_of_a_peer_are_widened_like_those_of_files() {
    let Some((device, gpu)) = devices() else { return };
    let mut rng = seeded();
    let mut num_formats = 0;
    for full in recorded_folders("reference-formats") {
        let checkpoint = Checkpoint::open(&full).expect("it opens");
        let model = checkpoint.config();
        let layer = model.moe_layers()[0];
        let stored = checkpoint.expert(layer, 0).expect("an expert").up.format();
        let declared = model.quantization.as_ref().and_then(|found| found.fp8_block);
        // Without files the configuration counts, and says nothing of experts in another format than the rest.
        let is_mixed = declared == Some(checkpoint::FP8_BLOCK) && stored.code_bits() != 8;
        if !model.hidden.is_multiple_of(128) || is_mixed {
            continue;
        }
        let shape = crate::common::shape_of(&checkpoint);
        let fleet = Fleet::of_replicas().await;
        let a = fleet.server("a", &full, WeightsFrom::Disk).await;
        let g = fleet.gpu_server("g", &full, WeightsFrom::Peers, device).await;
        let disk = fleet.gpu_server("disk", &full, WeightsFrom::Disk, device).await;
        assert_eq!(read_bytes(&g, "peer"), g.expert_bytes() as f64, "{full:?}");
        assert_eq!(g.expert_bytes(), disk.expert_bytes(), "{full:?}");
        let mut request = Request::random(&mut rng, &shape, 9);
        request.layer = layer;
        let mut answers = Vec::new();
        for server in [&g, &disk] {
            let mut client = join(&gpu, server, shape, 1, DTYPE).await;
            let (outcome, rows) = tokio::task::block_in_place(|| client.layer(&request));
            assert_eq!(outcome, Outcome::Answered, "{full:?}");
            answers.push(rows.iter().map(|value| value.to_bits()).collect::<Vec<_>>());
        }
        assert_eq!(answers[0], answers[1], "{full:?}");
        for server in [a, g, disk] {
            server.shutdown().await;
        }
        num_formats += 1;
    }
    assert!(num_formats >= 30, "{num_formats} formats only");
}
