//! Times what a call of one frame executes for traces when there is no recorder, beside the same loop without it:
//! `rustc -O checks.rs && ./checks`. The statements are those of client and server, on values that the compiler cannot
//! know.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

struct Recorder(Arc<u64>);

struct Shared {
    recorder: Option<Recorder>,
}

struct Call {
    is_traced: bool,
    context: Option<(u128, u64, bool)>,
    sequence: u64,
}

/// Both sides of one call: begin, one answered frame, the server's batch, the end.
#[inline(never)]
fn with(shared: &Shared, server: &Shared, call: &mut Call) -> u64 {
    // `Call::begin`
    call.is_traced = false;
    call.context = None;
    // `Lane::begin_sequences`
    call.sequence |= 1023;
    call.is_traced = shared.recorder.as_ref().is_some_and(|recorder| *recorder.0 == call.sequence);
    call.sequence += 1;
    let call = black_box(call);
    let mut recorded = 0;
    // `exchange::take_answer`
    if call.is_traced {
        recorded += black_box(1);
    }
    // `DataThread::run_batch`
    if let Some(recorder) = &black_box(server).recorder {
        recorded += *recorder.0;
    }
    // `Handle::finish`, at its begin and at its end
    let combining = call.is_traced.then(Instant::now);
    let call = black_box(call);
    if let Some(combining) = combining {
        recorded += black_box(combining).elapsed().as_nanos() as u64;
    }
    recorded + call.sequence
}

#[inline(never)]
fn without(_: &Shared, server: &Shared, call: &mut Call) -> u64 {
    call.sequence |= 1023;
    call.sequence += 1;
    let call = black_box(call);
    black_box(server);
    let call = black_box(call);
    call.sequence
}

fn main() {
    let none = || Shared { recorder: black_box(None) };
    let (shared, server) = (none(), none());
    let mut call = Call { is_traced: false, context: None, sequence: 0 };
    let mut arms =
        [(with as fn(&Shared, &Shared, &mut Call) -> u64, Vec::new()), (without, Vec::new())];
    for turn in 0..ROUNDS * 2 {
        let (function, times) = &mut arms[(turn / 2 + turn) % 2];
        let start = Instant::now();
        for _ in 0..CALLS {
            black_box(function(black_box(&shared), black_box(&server), black_box(&mut call)));
        }
        times.push(start.elapsed().as_nanos() as f64 / f64::from(CALLS));
    }
    for (name, (_, times)) in ["with", "without"].iter().zip(&mut arms) {
        times.sort_by(f64::total_cmp);
        println!(
            "{name}: median {:.2} ns a call, p90 {:.2}",
            times[ROUNDS / 2],
            times[ROUNDS * 9 / 10]
        );
    }
    println!("context kept: {}", call.context.is_some());
}

const CALLS: u32 = 100_000;
const ROUNDS: usize = 1000;
