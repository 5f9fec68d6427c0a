//! The kernels against Rust, on random input: every byte of the frames, lists and sums, and what is
//! refused.
//!
//! On every machine they run on the processor: the library under test is made of the kernels' own
//! headers, only single instructions and CUDA's intrinsics are replaced (`host/shim`), and every CUDA
//! thread is a fibre. With the feature `cuda` and a GPU, the same tests run there, launched from Rust.

mod checks;
#[cfg(feature = "cuda")]
mod gpu;
mod layer;
mod library;
mod refusals;
mod runner;
mod world;

use rand::SeedableRng;
use rand::rngs::StdRng;

use crate::runner::Runner;

macro_rules! on {
    ($($place:ident: $runner:expr;)*) => { $(
        mod $place {
            use super::{Runner, layer, refusals};

            #[test]
            fn layers_with_fp8_requests() {
                $runner.iter().for_each(layer::layers_with_fp8_requests);
            }

            #[test]
            fn layers_with_bf16_requests() {
                $runner.iter().for_each(layer::layers_with_bf16_requests);
            }

            #[test]
            fn echo_answers_as_recv_and_send_do() {
                $runner.iter().for_each(layer::echo_answers_as_recv_and_send_do);
            }

            #[test]
            fn expert_outputs_are_weighted_and_summed_in_order() {
                $runner.iter().for_each(layer::expert_outputs_are_weighted_and_summed_in_order);
            }

            #[test]
            fn a_server_that_does_not_answer_is_left_out_and_named() {
                $runner.iter().for_each(layer::a_server_that_does_not_answer_is_left_out_and_named);
            }

            #[test]
            fn headers_with_one_wrong_field_are_refused_for_it() {
                $runner.iter().for_each(refusals::headers_with_one_wrong_field_are_refused_for_it);
            }

            #[test]
            fn wrong_entries_and_scales_are_refused() {
                $runner.iter().for_each(refusals::wrong_entries_and_scales_are_refused);
            }
        }
    )* };
}

on! { on_the_host: Runner::host(); }
#[cfg(feature = "cuda")]
on! { on_the_gpu: Runner::gpu(); }

/// Random numbers of this run.
fn fresh() -> StdRng {
    let seed = std::env::var("SWITCHYARD_TEST_SEED")
        .ok()
        .and_then(|s| s.parse().ok())
        .unwrap_or_else(rand::random);
    println!("seed {seed} (set SWITCHYARD_TEST_SEED to repeat)");
    StdRng::seed_from_u64(seed)
}
