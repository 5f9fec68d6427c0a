//! Flags by messages that count the writes before them, for networks whose atomics cannot be had or relied
//! upon: the bytes of a message, and the order in which the receiving side puts in place what came. Without
//! any library; `libfabric` carries all its flags so, `verbs` those of devices without atomics.

pub mod inbound;
pub mod message;
