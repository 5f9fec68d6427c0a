//! Checkpoints: valid, generated, damaged, and compared with transformers.

mod config;
mod damage;
mod dtypes;
mod fingerprint;
mod make;
mod reference;
mod support;
