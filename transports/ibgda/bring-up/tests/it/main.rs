//! Tests of the program, as processes over NICs in software.

mod peers;
mod run;
mod stages;
