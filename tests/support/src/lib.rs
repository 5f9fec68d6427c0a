//! Multi-process end-to-end and fault tests, and the fault rig.
//!
//! The rig ([`rig`], binary `fault-rig`) runs layers through a cluster of real processes while servers
//! and the control plane are killed, frozen, drained and restarted by a [`schedule`] that one seed
//! determines, and compares every output with an [oracle](inputs) that shares no code with the service.
//!
//! The binary is also the servers that it starts: called as `fault-rig expert-server …` it is the
//! `switchyard` command with [`failpoints`] armed, so that what is tested never depends on which binary
//! was built last.

pub mod churn;
pub mod descriptors;
pub mod failpoints;
pub mod idle;
pub mod inputs;
pub mod namespaces;
pub mod procfs;
pub mod replicas;
pub mod report;
pub mod rig;
pub mod schedule;
pub mod victim;
pub mod worker;
