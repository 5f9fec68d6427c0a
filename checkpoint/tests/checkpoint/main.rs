//! Checkpoints: valid, generated, damaged, and compared with transformers.

mod arithmetic;
mod config;
mod damage;
mod descriptions;
mod dtypes;
mod families;
mod fingerprint;
mod folders;
mod formats;
mod make;
mod reference;
mod support;
mod truncation;

test_support::child_processes! { "reader" => truncation::reader }
