//! Tests of the program, as processes over NICs in software.

mod peers;
mod run;
#[path = "../../../../../tests/support/src/skip.rs"]
mod skip;
mod stages;
