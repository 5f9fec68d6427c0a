//! The kernels against Rust, on random input: every byte of the frames, lists and sums, and all refusals.
//!
//! On every machine they run on the processor. The library under test is made of the kernels' own headers. Only
//! single instructions and CUDA's intrinsics are replaced (`host/shim`), and every CUDA thread is a fibre. With
//! the feature `cuda` and a GPU, the same tests run there, launched from Rust.

mod checks;
#[cfg(any(feature = "cuda", feature = "emulated"))]
mod convert;
mod device_abi;
mod expiry;
mod few;
mod gathering;
#[cfg(any(feature = "cuda", feature = "emulated"))]
mod gpu;
mod layer;
mod library;
#[allow(dead_code, reason = "only paths that post refuse anything")]
mod link_calls;
mod paths;
mod refusals;
mod runner;
mod torn;
mod world;

// Other packages' tests include `library.rs`, `link_calls.rs` and `world.rs`, and know the crate by this name.
extern crate switchyard_kernels as kernels;

use rand::SeedableRng;
use rand::rngs::StdRng;

use crate::runner::Runner;

macro_rules! on {
    ($($place:ident: $runner:expr;)*) => { $(
        mod $place {
            use super::{Runner, expiry, few, gathering, layer, refusals, torn, paths};

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
            fn who_was_in_the_last_batch_is_waited_for_within_the_bound() {
                let test = gathering::who_was_in_the_last_batch_is_waited_for_within_the_bound;
                $runner.iter().for_each(test);
            }

            #[test]
            fn headers_with_one_wrong_field_are_refused_for_it() {
                $runner.iter().for_each(refusals::headers_with_one_wrong_field_are_refused_for_it);
            }

            #[test]
            fn who_is_refused_leaves_the_lists_of_others_right() {
                $runner
                    .iter()
                    .for_each(refusals::who_is_refused_leaves_the_lists_of_others_right);
            }

            #[test]
            fn wrong_entries_and_scales_are_refused() {
                $runner.iter().for_each(refusals::wrong_entries_and_scales_are_refused);
            }

            #[test]
            fn an_expired_wait_leaves_what_it_saw_in_the_error_word() {
                let test = expiry::an_expired_wait_leaves_what_it_saw_in_the_error_word;
                $runner.iter().for_each(test);
            }

            #[test]
            fn every_client_that_withholds_rows_of_a_batch_is_noted() {
                let test = expiry::every_client_that_withholds_rows_of_a_batch_is_noted;
                $runner.iter().for_each(test);
            }

            #[test]
            fn a_path_that_is_not_quiet_is_told_from_a_frame_that_did_not_come() {
                let test = paths::a_path_that_is_not_quiet_is_told_from_a_frame_that_did_not_come;
                $runner.iter().for_each(test);
            }

            #[test]
            fn a_server_that_stands_still_behind_its_answer_is_given_up_at_the_deadline() {
                let test =
                    paths::a_server_that_stands_still_behind_its_answer_is_given_up_at_the_deadline;
                $runner.iter().for_each(test);
            }

            #[test]
            fn a_sum_has_the_parts_that_are_not_missing_and_no_others() {
                let test = torn::a_sum_has_the_parts_that_are_not_missing_and_no_others;
                $runner.iter().for_each(test);
            }

            #[test]
            fn answers_of_other_frames_do_not_count() {
                $runner.iter().for_each(torn::answers_of_other_frames_do_not_count);
            }

            #[test]
            fn few_blocks_sum_what_many_do() {
                $runner.iter().for_each(few::few_blocks_sum_what_many_do);
            }
        }
    )* };
}

on! { on_the_host: Runner::host(); }
#[cfg(feature = "cuda")]
on! { on_the_gpu: Runner::gpu(); }
#[cfg(feature = "emulated")]
on! { on_an_emulated_gpu: Runner::emulated(); }

#[cfg(any(feature = "cuda", feature = "emulated"))]
macro_rules! with_streams {
    ($($place:ident: $runner:expr;)*) => { $(
        mod $place {
            use super::{Runner, convert, gpu};

            #[test]
            fn a_layer_replays_from_a_graph() {
                $runner.iter().for_each(gpu::a_layer_replays_from_a_graph);
            }

            #[test]
            fn pointers_that_the_driver_does_not_know_are_refused() {
                $runner.iter().for_each(gpu::pointers_that_the_driver_does_not_know_are_refused);
            }

            #[test]
            fn a_layer_with_real_experts() {
                $runner.iter().for_each(gpu::a_layer_with_real_experts);
            }

            #[test]
            fn an_event_of_a_graph_is_done_with_the_replay() {
                let case = gpu::an_event_of_a_graph_is_done_with_the_replay;
                $runner.iter().for_each(case);
            }

            #[test]
            fn work_keeps_its_order_and_waits_have_a_bound() {
                $runner.iter().for_each(gpu::work_keeps_its_order_and_waits_have_a_bound);
            }

            #[test]
            fn what_the_host_is_told_is_what_lay_there_in_stream_order() {
                let case = gpu::what_the_host_is_told_is_what_lay_there_in_stream_order;
                $runner.iter().for_each(case);
            }

            #[test]
            fn matrices_are_converted_as_the_host_converts_them() {
                let case = convert::matrices_are_converted_as_the_host_converts_them;
                $runner.iter().for_each(case);
            }

            #[test]
            fn checksums_are_those_that_the_host_computes() {
                $runner.iter().for_each(gpu::checksums_are_those_that_the_host_computes);
            }

            #[test]
            fn memory_of_the_host_goes_without_waiting_for_work() {
                $runner.iter().for_each(gpu::memory_of_the_host_goes_without_waiting_for_work);
            }

            #[test]
            fn shared_memory_is_one_memory_and_knows_its_size() {
                $runner.iter().for_each(gpu::shared_memory_is_one_memory_and_knows_its_size);
            }

            #[test]
            fn a_sender_waits_for_the_others() {
                $runner.iter().for_each(gpu::a_sender_waits_for_the_others);
            }
        }
    )* };
}

#[cfg(feature = "cuda")]
with_streams! { with_streams_on_the_gpu: Runner::gpu(); }
#[cfg(feature = "emulated")]
with_streams! { with_streams_on_an_emulated_gpu: Runner::emulated(); }

#[cfg(feature = "emulated")]
#[test]
fn a_server_that_only_moves_its_progress_word_is_given_up() {
    Runner::emulated().iter().for_each(gpu::a_server_that_only_moves_its_progress_word_is_given_up);
}

#[cfg(feature = "cuda")]
mod of_the_driver {
    use super::{Runner, gpu};

    #[test]
    fn calls_leave_the_context_of_the_thread_alone_on_the_gpu() {
        Runner::gpu().iter().for_each(gpu::calls_leave_the_context_of_the_thread_alone);
    }

    #[test]
    fn memory_of_another_gpu_is_told_apart_on_the_gpu() {
        Runner::gpu().iter().for_each(gpu::memory_of_another_gpu_is_told_apart);
    }
}

#[test]
fn bytes_go_to_a_slot_and_back_over_direct_stores() {
    /// A slot of this process is its own window.
    struct Direct(Vec<u128>);
    impl link_calls::Ends for Direct {
        fn link(&self) -> kernels::abi::Link {
            let window = kernels::abi::DevicePtr(self.slot() as u64);
            let path = kernels::abi::PATH_DIRECT;
            kernels::abi::Link { window, context: 0, path, reserved: 0 }
        }

        fn slot_bytes(&self) -> usize {
            self.0.len() * 16
        }

        fn slot(&self) -> *mut u8 {
            self.0.as_ptr().cast_mut().cast()
        }
    }
    let Some(library) = library::library() else { return };
    let slot = Direct(vec![0; 4096]);
    link_calls::bytes_go_there_and_back(library, &mut fresh(), &slot);
}

/// Random numbers of this run.
fn fresh() -> StdRng {
    let seed = std::env::var("SWITCHYARD_TEST_SEED")
        .ok()
        .and_then(|s| s.parse().ok())
        .unwrap_or_else(rand::random);
    println!("seed {seed} (set SWITCHYARD_TEST_SEED to repeat)");
    StdRng::seed_from_u64(seed)
}
