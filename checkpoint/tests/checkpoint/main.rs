//! Checkpoints as a user meets them: whole, made, damaged, and against transformers.

mod config;
mod damage;
mod dtypes;
mod fingerprint;
mod make;
mod reference;
mod support;
