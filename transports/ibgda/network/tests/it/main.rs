//! Tests of slots of GPUs over RDMA, on NICs in software.

mod offers;
mod over_libfabric;
mod pairs;
mod queues;
mod rig;
