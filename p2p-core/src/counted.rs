//! Flags by messages that count the writes before them, for networks without usable atomics.
//!
//! [`message`] has the bytes of a message, [`inbound`] the order in which the receiving side applies messages. Neither
//! needs a library. The libfabric transport sends all flags this way, the verbs transport those of devices without
//! atomics.

pub mod inbound;
pub mod message;
