//! The fault rig and other rigs of whole services, for end-to-end and fault tests.
//!
//! The rig ([`rig`], binary `fault-rig`) runs layers through a cluster of real processes. Meanwhile servers and the
//! control plane are killed, frozen, drained and restarted by a [`schedule`] that one seed determines. Every output is
//! compared with an [oracle](inputs) that shares no code with the service.
//!
//! The binary is also the servers that it starts. Called as `fault-rig expert-server …` it is the `switchyard` command
//! with [`failpoints`] armed, so the tested code never depends on which binary was built last.

pub mod churn;
pub mod failpoints;
pub mod idle;
pub mod inputs;
pub mod replicas;
pub mod report;
pub mod rig;
pub mod schedule;
pub mod victim;
pub mod worker;
