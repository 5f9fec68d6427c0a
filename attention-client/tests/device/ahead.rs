//! Calls that are summed before their rows are asked for, by kernels that do not get to it in time.

use std::sync::mpsc::Sender;
use std::time::Duration;

use kernels::gpu::{DeviceName, GpuError, Stream};
use switchyard_attention_client::device::DeviceHandle;
use switchyard_attention_client::{DeviceClient, DeviceError};

use crate::client_common::seeded;
use crate::faults::metric;
use crate::order::{Call, DTYPE, beside_one_that_stands_still, die};
use crate::rig::{Replicas, builder, devices};

/// Three calls, and what becomes of them: the first is over, and the second, of the second stream, lies where
/// the third one's frames belong, whose dispatch was refused because the sum of the second did not end in time.
struct Begun {
    replicas: Replicas,
    client: DeviceClient,
    streams: [Stream; 2],
    second: Call,
    handle: DeviceHandle,
    third: Call,
    /// Ends what the first stream waits for.
    holding: Sender<()>,
}

/// On GPUs in software only: while a call of the host holds one stream, a driver (580.159.04) does not return from
/// an asynchronous copy that another stream is given.
fn begun(test: &str) -> Option<Begun> {
    let mut rng = seeded(test);
    if let (_, DeviceName::Cuda(_)) = devices()? {
        println!("{test} holds a stream by a call of the host: on GPUs in software only");
        return None;
    }
    let replicas = Replicas::start(DTYPE)?;
    let limit = Duration::from_secs(2);
    let mut client = replicas.connect(builder(&replicas.model).deadline(limit).work_limit(limit));
    let streams = [(); 2].map(|()| client.gpu().stream().expect("stream"));
    let event = client.gpu().event().expect("event");
    let [first, second, third] =
        beside_one_that_stands_still(&mut rng, &replicas, &mut client, &streams[0]);
    let handle = first.dispatch(&mut client, &streams[0]);
    streams[0].record(&event).expect("recorded");
    streams[1].wait_for(&event).expect("ordered");
    let later = second.dispatch(&mut client, &streams[1]);
    streams[1].record(&event).expect("recorded");
    streams[0].wait_for(&event).expect("ordered");
    die(&replicas, &client);
    let pending = first.combine(&mut client, &streams[0], handle);
    first.finish(&mut client, &streams[0], pending, &mut replicas.local());
    let (holding, hold) = std::sync::mpsc::channel::<()>();
    streams[0].then(move || _ = hold.recv()).expect("held");
    let input = third.tensors.load(&third.request);
    // SAFETY: the tensors have these sizes and outlive the call.
    let refused = unsafe { client.dispatch(&streams[0], third.request.layer, &input) };
    let error = refused.unwrap_err();
    assert!(matches!(error, DeviceError::Gpu(GpuError::Deadline { .. })), "{error}");
    Some(Begun { replicas, client, streams, second, handle: later, third, holding })
}

/// Lets the first stream go on while `work` is done.
fn released<R>(holding: Sender<()>, work: impl FnOnce() -> R) -> R {
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(500));
            drop(holding);
        });
        work()
    })
}

#[test]
fn a_sum_ahead_that_comes_late_is_waited_for_by_its_own_call() {
    let test = "a_sum_ahead_that_comes_late_is_waited_for_by_its_own_call";
    let Some(Begun { replicas, mut client, streams, second, handle, third, holding }) = begun(test)
    else {
        return;
    };
    let (client, local) = (&mut client, &mut replicas.local());
    let pending = released(holding, || second.combine(client, &streams[1], handle));
    assert_eq!(second.finish(client, &streams[1], pending, local).failovers, 1);
    let handle = third.dispatch(client, &streams[0]);
    let pending = third.combine(client, &streams[0], handle);
    assert_eq!(third.finish(client, &streams[0], pending, local).failovers, 0);
    assert_eq!(metric(client, "switchyard_client_failovers_total", None), 1.0);
}

/// The third one's answers come where the second one's still lie.
#[test]
fn a_sum_ahead_that_comes_late_is_waited_for_by_the_next_call() {
    let test = "a_sum_ahead_that_comes_late_is_waited_for_by_the_next_call";
    let Some(Begun { replicas, mut client, streams, second, handle, third, holding }) = begun(test)
    else {
        return;
    };
    let (client, local) = (&mut client, &mut replicas.local());
    let next = released(holding, || third.dispatch(client, &streams[1]));
    let pending = second.combine(client, &streams[1], handle);
    assert_eq!(second.finish(client, &streams[1], pending, local).failovers, 1);
    let pending = third.combine(client, &streams[1], next);
    assert_eq!(third.finish(client, &streams[1], pending, local).failovers, 0);
    assert_eq!(metric(client, "switchyard_client_failovers_total", None), 1.0);
}

/// Nor does it wait longer when its caller has given it up.
#[test]
fn a_sum_ahead_that_comes_late_may_be_given_up() {
    let test = "a_sum_ahead_that_comes_late_may_be_given_up";
    let Some(Begun { replicas, mut client, streams, second, handle, third, holding }) = begun(test)
    else {
        return;
    };
    let (client, local) = (&mut client, &mut replicas.local());
    drop(handle);
    let next = released(holding, || third.dispatch(client, &streams[1]));
    let pending = third.combine(client, &streams[1], next);
    assert_eq!(third.finish(client, &streams[1], pending, local).failovers, 0);
    assert_eq!(metric(client, "switchyard_client_abandoned_requests_total", None), 1.0);
    drop(second);
}
