//! Servers that show life but never answer.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kernels::abi::{DTYPE_F8_E4M3, FrameGeometry};
use kernels::gpu::DeviceName;
use p2p_core::slot::PROGRESS;
use protocol::WireDtype;
use rustix::process::Signal;
use switchyard_attention_client::device::ReplayOutcome;

use crate::client_common::{Request, seeded};
use crate::faults::{MANY, metric};
use crate::graphs::{NUM_TOKENS, record};
use crate::rig::{Replicas, SLOT, Tensors, builder, devices, forward};

const DTYPE: WireDtype = WireDtype::F8E4m3;
const DEADLINE: Duration = Duration::from_millis(1000);
const WORK_LIMIT: Duration = Duration::from_millis(1500);
/// GPU of the clients here.
const CLIENT: u32 = 5;
/// Longer than the client's own bound, and than what it gives kernels whose waits it has ended.
const PATIENCE: Duration = Duration::from_secs(40);

/// Every response slot of this process, and the layout of a slot.
pub fn response_slots(client: DeviceName, replicas: &Replicas) -> (Vec<File>, FrameGeometry) {
    let DeviceName::Emulated(ordinal) = client else { unreachable!("asked for before") };
    let shape = replicas.model.shape;
    let (frames, bytes) = (SLOT.num_frames as u32, SLOT.slot_bytes as u64);
    let tokens =
        FrameGeometry::tokens_for_slot(shape.hidden, shape.top_k, DTYPE_F8_E4M3, frames, bytes);
    let geometry = FrameGeometry::new(shape.hidden, shape.top_k, DTYPE_F8_E4M3, tokens, frames)
        .expect("a geometry");
    let name = format!("/memfd:switchyard-emulated-gpu-{ordinal} (deleted)");
    let slots: Vec<File> = std::fs::read_dir("/proc/self/fd")
        .expect("descriptors")
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| std::fs::read_link(path).is_ok_and(|to| to.to_string_lossy() == name))
        .filter_map(|path| OpenOptions::new().read(true).write(true).open(path).ok())
        .filter(|file| file.metadata().is_ok_and(|at| at.len() >= geometry.response_slot_bytes))
        .collect();
    (slots, geometry)
}

/// Adds to the word by which servers show life, in every response slot of this process, as servers do that
/// are at work.
fn with_life<R>(client: DeviceName, replicas: &Replicas, work: impl FnOnce() -> R) -> R {
    let (slots, geometry) = response_slots(client, replicas);
    assert!(slots.len() >= 2, "{} slots", slots.len());
    let at = geometry.response_control_offset + PROGRESS as u64;
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for turn in 1u64.. {
                if is_over.load(Ordering::Relaxed) {
                    break;
                }
                for slot in &slots {
                    slot.write_all_at(&(turn << 20).to_ne_bytes(), at).expect("a slot");
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        // Also when an assertion fails: the scope waits for the thread.
        let _over = Over(&is_over);
        work()
    })
}

/// Sets a flag when dropped.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn pair() -> Option<(Replicas, DeviceName)> {
    within_reach(2, CLIENT)
}

/// Servers whose answers a test can write: no other test of this process has clients on the GPU with this number.
pub fn within_reach(num_servers: usize, ordinal: u32) -> Option<(Replicas, DeviceName)> {
    let (_, client) = devices()?;
    if !matches!(client, DeviceName::Emulated(_)) {
        test_support::skip("emulated", "slots of a real GPU are out of this test's reach");
        return None;
    }
    let mut replicas = Replicas::of(DTYPE, num_servers, SLOT.num_frames)?;
    replicas.client = DeviceName::Emulated(ordinal);
    let client = replicas.client;
    Some((replicas, client))
}

#[test]
fn a_server_that_works_but_never_answers_has_failed_at_the_limit() {
    let mut rng = seeded("a_server_that_works_but_never_answers_has_failed_at_the_limit");
    let Some((pair, device)) = pair() else { return };
    let mut client = pair.connect(builder(&pair.model).deadline(DEADLINE).work_limit(WORK_LIMIT));
    let (tensors, mut local) = (Tensors::new(&client), pair.local());
    let stream = client.gpu().stream().expect("stream");
    let request = Request::random(&mut rng, &pair.model, MANY, 4);
    forward(&mut client, &stream, &tensors, &request, &mut local, DTYPE);
    pair.server(0).signal(Signal::STOP);
    with_life(device, &pair, || {
        // Its GPU may have been given batches before.
        let start = Instant::now();
        let mut failovers = 0;
        while failovers == 0 {
            let request = Request::random(&mut rng, &pair.model, MANY, 4);
            let timing = forward(&mut client, &stream, &tensors, &request, &mut local, DTYPE);
            failovers = timing.failovers;
            assert!(failovers == 0 || timing.resent_pairs > 0, "{timing:?}");
            assert!(start.elapsed() < PATIENCE, "it was never given up");
        }
        assert_eq!(failovers, 1);
        assert_eq!(metric(&client, "switchyard_client_failovers_total", Some("stuck")), 1.0);
        assert_eq!(metric(&client, "switchyard_client_failovers_total", Some("silent")), 0.0);
        // Servers that answered stay in use.
        let request = Request::random(&mut rng, &pair.model, MANY, 4);
        let timing = forward(&mut client, &stream, &tensors, &request, &mut local, DTYPE);
        assert_eq!((timing.failovers, timing.num_servers), (0, 1));
    });
}

/// Warps wait for one of them after the other, but both had their time.
#[test]
fn two_servers_that_never_answer_have_failed_at_one_limit() {
    let mut rng = seeded("two_servers_that_never_answer_have_failed_at_one_limit");
    let Some((replicas, device)) = within_reach(3, CLIENT) else { return };
    let settings = builder(&replicas.model).deadline(DEADLINE).work_limit(WORK_LIMIT);
    let mut client = replicas.connect(settings);
    let (tensors, mut local) = (Tensors::new(&client), replicas.local());
    let stream = client.gpu().stream().expect("stream");
    let request = Request::random(&mut rng, &replicas.model, MANY, 4);
    forward(&mut client, &stream, &tensors, &request, &mut local, DTYPE);
    replicas.server(0).signal(Signal::STOP);
    replicas.server(1).signal(Signal::STOP);
    with_life(device, &replicas, || {
        let timing = forward(&mut client, &stream, &tensors, &request, &mut local, DTYPE);
        assert_eq!(timing.failovers, 2, "{timing:?}");
        // The limit is what comes up to it, and five seconds.
        let limit = WORK_LIMIT + 2 * DEADLINE + Duration::from_secs(5);
        let waited = Duration::from_nanos(timing.wait_ns);
        assert!(waited >= limit && waited < limit * 3 / 2, "{waited:?} of {limit:?}");
        assert_eq!(metric(&client, "switchyard_client_failovers_total", Some("stuck")), 2.0);
        let timing = forward(&mut client, &stream, &tensors, &request, &mut local, DTYPE);
        assert_eq!((timing.failovers, timing.num_servers), (0, 1));
    });
}

#[test]
fn only_who_holds_up_the_oldest_of_many_calls_has_failed() {
    let mut rng = seeded("only_who_holds_up_the_oldest_of_many_calls_has_failed");
    let Some((pair, device)) = pair() else { return };
    let mut client = pair.connect(builder(&pair.model).deadline(DEADLINE).work_limit(WORK_LIMIT));
    let capacity = 4 * client.max_tokens();
    let (tensors, mut local) = (Tensors::with_capacity(&client, capacity), pair.local());
    let stream = client.gpu().stream().expect("stream");
    let request = Request::random(&mut rng, &pair.model, capacity as usize, 4);
    forward(&mut client, &stream, &tensors, &request, &mut local, DTYPE);
    pair.server(0).signal(Signal::STOP);
    with_life(device, &pair, || {
        // As many parts are outstanding as slots have frames.
        let start = Instant::now();
        let timing = forward(&mut client, &stream, &tensors, &request, &mut local, DTYPE);
        assert!(start.elapsed() < PATIENCE, "{:?}", start.elapsed());
        // Frames of several parts were with it, and it failed once.
        assert!(timing.failovers == 1 && timing.resent_pairs > 0, "{timing:?}");
        let failovers = |reason| metric(&client, "switchyard_client_failovers_total", reason);
        assert_eq!((failovers(Some("stuck")), failovers(Some("silent"))), (1.0, 0.0));
        assert_eq!(failovers(None), 1.0, "no other server has failed");
        let timing = forward(&mut client, &stream, &tensors, &request, &mut local, DTYPE);
        assert_eq!((timing.failovers, timing.num_servers), (0, 1));
    });
}

#[test]
fn a_dropped_call_does_not_hold_up_those_behind_it() {
    let mut rng = seeded("a_dropped_call_does_not_hold_up_those_behind_it");
    let Some((pair, device)) = pair() else { return };
    let mut client = pair.connect(builder(&pair.model).deadline(DEADLINE).work_limit(WORK_LIMIT));
    let (tensors, mut local) = (Tensors::new(&client), pair.local());
    let stream = client.gpu().stream().expect("stream");
    let request = Request::random(&mut rng, &pair.model, MANY, 4);
    forward(&mut client, &stream, &tensors, &request, &mut local, DTYPE);
    pair.server(0).signal(Signal::STOP);
    with_life(device, &pair, || {
        for _ in 0..4 {
            let input = tensors.load(&request);
            // SAFETY: the tensors have these sizes and outlive the call.
            drop(unsafe { client.dispatch(&stream, request.layer, &input).expect("dispatch") });
        }
        let start = Instant::now();
        forward(&mut client, &stream, &tensors, &request, &mut local, DTYPE);
        assert!(start.elapsed() < PATIENCE, "{:?}", start.elapsed());
        assert_eq!(metric(&client, "switchyard_client_failovers_total", Some("stuck")), 1.0);
    });
}

#[test]
fn a_graph_survives_a_server_that_works_but_never_answers() {
    let mut rng = seeded("a_graph_survives_a_server_that_works_but_never_answers");
    let Some((pair, device)) = pair() else { return };
    let mut client = pair.connect(builder(&pair.model).deadline(DEADLINE).work_limit(WORK_LIMIT));
    let mut local = pair.local();
    let stream = client.gpu().stream().expect("stream");
    let recorded = record(&mut client, &stream);
    let request = Request::random(&mut rng, &pair.model, NUM_TOKENS, 4);
    recorded.load(&request);
    client.replay(&stream, &recorded.graph).expect("replay");
    recorded.check(&request, &mut local);
    pair.server(0).signal(Signal::STOP);
    with_life(device, &pair, || {
        recorded.load(&request);
        client.begin_replay(&stream).expect("a replay");
        stream.replay(&recorded.graph).expect("launched");
        let outcome = client.finish_replay(&stream).expect("it can be replayed again");
        let ReplayOutcome::Incomplete { reason } = outcome else { panic!("{outcome:?}") };
        assert!(
            reason.contains(" does not answer, in ") && reason.contains("check its log"),
            "{reason}"
        );
        assert!(!reason.contains("gone") && !reason.contains("closed"), "{reason}");
        let report = client.replay(&stream, &recorded.graph).expect("replay");
        assert_eq!(report.attempts, 1, "{report:?}");
        recorded.check(&request, &mut local);
        assert_eq!(metric(&client, "switchyard_client_failovers_total", Some("stuck")), 1.0);
    });
}
