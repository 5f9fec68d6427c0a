//! Tests of the control path of IBGDA against a stand-in for libibverbs and libmlx5, and of its device functions.

mod control;
mod handles;
mod library;
mod limits;
mod links;
#[path = "../mock/mod.rs"]
mod mock;
mod probe;
mod queues;
mod receives;
