//! Flags by messages that count the writes before them, for networks without usable atomics.
//!
//! [`message`] defines the bytes of a message. [`inbound`] defines the order in which the receiving
//! side applies messages. Neither needs a transport's library. The libfabric transport sends all
//! flags this way. The verbs transport does so for devices without atomics.

pub mod inbound;
pub mod message;
