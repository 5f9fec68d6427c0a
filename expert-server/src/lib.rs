//!

pub mod compute;
