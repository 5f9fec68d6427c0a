//! Tests of the reference model: against golden files, against a naive model in f64, and on broken input.

mod common;
mod families;
mod generate;
mod local_experts;
mod qwen3;
mod reference_blocks;
