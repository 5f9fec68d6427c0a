//! Latency and bandwidth of one-sided transfers between two engines.
